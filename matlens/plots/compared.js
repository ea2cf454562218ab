// The page of a comparison is all there; it can be light or dark.
import { followTheme } from "./elements.js";

followTheme(document.getElementById("theme"));
document.documentElement.dataset.ready = "";
