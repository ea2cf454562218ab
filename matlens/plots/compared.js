// The page of a comparison is all there; it can be light or dark.
import { find, followTheme } from "./elements.js";

followTheme(find("theme"));
document.documentElement.dataset.ready = "";
