// Data as Python packs them: typed arrays in base64 with their shapes.

const READERS = {
  f32: (view, at) => view.getFloat32(at, true),
  i16: (view, at) => view.getInt16(at, true),
  u8: (view, at) => view.getUint8(at),
  u16: (view, at) => view.getUint16(at, true),
  u32: (view, at) => view.getUint32(at, true),
};
const ARRAYS = { f32: Float32Array, i16: Int16Array, u8: Uint8Array, u16: Uint16Array, u32: Uint32Array };
const LITTLE = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

export function unpack(packed) {
  const text = atob(packed.base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const kind = ARRAYS[packed.kind];
  let values;
  if (LITTLE) {
    values = new kind(bytes.buffer);
  } else {
    const view = new DataView(bytes.buffer);
    values = kind.from({ length: bytes.length / kind.BYTES_PER_ELEMENT }, (_, i) => READERS[packed.kind](view, i * kind.BYTES_PER_ELEMENT));
  }
  const strides = packed.shape.map((_, axis) => packed.shape.slice(axis + 1).reduce((product, size) => product * size, 1));
  return {
    shape: packed.shape,
    values,
    at: (...index) => values[index.reduce((offset, place, axis) => offset + place * strides[axis], 0)],
  };
}

export function unpackAll(record) {
  const result = {};
  for (const [key, value] of Object.entries(record)) result[key] = value && value.base64 !== undefined ? unpack(value) : value;
  return result;
}

export function pageData() {
  return JSON.parse(document.getElementById("data").textContent);
}
