// Parts of the data that are scripts next to the page: a page opened from disk can run scripts, but not fetch.

const waiting = new Map();
const brought = new Map();

globalThis.matlensShard = (name, content) => {
  const [resolve] = waiting.get(name) || [];
  waiting.delete(name);
  if (resolve) resolve(content);
};

export function bring(name) {
  if (!brought.has(name)) {
    brought.set(
      name,
      new Promise((resolve, reject) => {
        const script = document.createElement("script");
        waiting.set(name, [resolve]);
        script.onerror = () => reject(new Error(`${name}.js cannot be read.`));
        script.src = `${name}.js`;
        document.head.append(script);
      }),
    );
  }
  return brought.get(name);
}
