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

// Groups of a batch as records; files have them as columns.
const groupsOf = (batch) => {
  if (!batch.list) {
    const names = Object.keys(batch.groups);
    batch.list = batch.groups.group.map((_, i) => {
      const group = { batch: batch.batch };
      names.forEach((n) => { group[n] = batch.groups[n][i]; });
      return group;
    });
  }
  return batch.list;
};

// Characters that nobody sees, or that turn the direction of writing, are written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]/gu;
const visible = (text) =>
  text.replace(HIDDEN, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`).replace(/\t/g, "\u21e5\t");
const cut = (text, most) => (text.length <= most ? visible(text) : `${visible(text.slice(0, most))} [${text.length - most} further characters]`);

const missing = (x) => x === null || x === undefined || Number.isNaN(x);
const ROUNDING = 1e-12; // a number below it is what rounding left of 0
const number = (x) => (missing(x) ? "\u2013" : Math.abs(x) < ROUNDING ? "0" : Number(x.toPrecision(4)).toString());
const signed = (x) => (x >= ROUNDING ? "+" : "") + number(x);
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const mean = (values) => {
  const known = values.filter((v) => !missing(v));
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
const largest = (values, least = 0) => values.reduce((a, b) => (missing(b) || b < a ? a : b), least);

// Place in the page: #batch=3&group=5&rollout=2&color=advantage
const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = (changes) => {
  const words = { ...place(), ...changes };
  Object.keys(words).forEach((k) => words[k] === null && delete words[k]);
  return `#${new URLSearchParams(words)}`;
};
const go = (changes) => { location.hash = link(changes); };
