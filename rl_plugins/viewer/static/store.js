"use strict";
// Data of the trace. Every file under data/ calls `rlTrace.put(name, value)`; those of groups are loaded when looked at.
const rlTrace = (() => {
  const known = new Map();
  const waiting = new Map();
  return {
    put(name, value) {
      known.set(name, value);
      (waiting.get(name) || []).forEach((call) => call());
      waiting.delete(name);
    },
    get: (name) => known.get(name),
    load(name, done) {
      if (known.has(name)) return done();
      if (waiting.has(name)) return waiting.get(name).push(done);
      waiting.set(name, [done]);
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onerror = () => rlTrace.put(name, null);
      document.head.append(script);
    },
  };
})();

// Characters that nobody sees, or that turn the direction of writing, are written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]/gu;
const visible = (text) =>
  text.replace(HIDDEN, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`).replace(/\t/g, "\u21e5\t");

const number = (x) => (x === null || x === undefined || Number.isNaN(x) ? "\u2013" : Number(x.toPrecision(4)).toString());

// Place in the page: #batch=3&group=5&rollout=2&color=advantage
const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = (changes) => {
  const words = { ...place(), ...changes };
  Object.keys(words).forEach((k) => words[k] === null && delete words[k]);
  return `#${new URLSearchParams(words)}`;
};
