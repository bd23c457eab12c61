// What a script finds besides its own code, and what carries events in and out of it.
//
// Evaluated once per engine, before the script; the last expression is what the engine calls. A
// script sees native events, each with `table`, `timestamp` and `route` in addition. It gives back
// events: the same objects, copies (`{...event}`), or new ones. What comes out is told relative to
// what went in, so that a field which the script left alone keeps its spelling to the byte.
(() => {
  "use strict";
  const { parse, stringify, rawJSON } = JSON;
  const isArray = Array.isArray;
  let routes = new WeakMap();
  let batch = [];
  let given = [];

  class Event {
    route(to) {
      routes.set(this, to);
    }
  }
  globalThis.route = (event, to) => {
    routes.set(event, to);
  };
  globalThis.setTimeout = undefined; // the library brings it along; scripts have no timers
  globalThis.clearTimeout = undefined;
  BigInt.prototype.toJSON = function () {
    return rawJSON(this.toString());
  };

  // Numbers that JavaScript would write otherwise (1.10, 12345678901234567890) as they are spelled.
  const spelled = (_, value, { source }) =>
    typeof value === "number" && source !== String(value) ? rawJSON(source) : value;

  // `value`, with the spelling of `original` for the numbers that are still the same.
  const respelled = (value, original) => {
    if (typeof value === "number") {
      return JSON.isRawJSON(original) && Number(original.rawJSON) === value ? original : value;
    }
    if (typeof value !== "object" || value === null) return value;
    if (typeof original !== "object" || original === null) return value;
    if (isArray(value)) return value.map((one, place) => respelled(one, original[place]));
    const made = {};
    for (const name of Object.keys(value)) {
      Object.defineProperty(made, name, {
        value: respelled(value[name], Object.hasOwn(original, name) ? original[name] : undefined),
        enumerable: true, configurable: true, writable: true,
      });
    }
    return made;
  };

  const kind = (value) => (value === null ? "null" : typeof value);

  const refused = (value) => {
    throw new TypeError(
      `JS processor returned unsupported type: ${kind(value)} (expected array, object, or null)`,
    );
  };

  // The events that a call returned: an array, a single one, or nothing for the ones it was given.
  const returned = (value, otherwise) => {
    if (value === null || value === undefined) return otherwise;
    if (typeof value !== "object") refused(value);
    if (!isArray(value)) return [value];
    for (const one of value) if (typeof one !== "object" || one === null) refused(one);
    return value;
  };

  const fields = (event, number) => [
    stringify(event.before) ?? "null",
    stringify(event.after) ?? "null",
    stringify(event.tags) ?? "null",
    event.op, event.ts_ms, event.source?.db, event.source?.schema, event.source?.table, event.synthetic,
    number,
  ];

  return {
    // Take in a batch, the JSON text of an array of native events.
    take(text) {
      batch = parse(text);
      given = new Map();
      routes = new WeakMap();
      batch.forEach((event, number) => {
        given.set(event, fields(event, number));
        const { db, schema, table } = event.source;
        event.table = `${schema ?? db}.${table}`;
        event.timestamp = event.ts_ms;
        Object.setPrototypeOf(event, Event.prototype);
      });
    },

    // Run the script over the batch; `each` calls it for one event at a time.
    run(call, each) {
      const events = isArray(batch) ? [...batch] : [];
      batch = each ? events.flatMap((one) => returned(call(one), [one])) : returned(call(events), events);
    },

    // Tell what came out: null when nothing changed, else the JSON text of an array with, for each
    // event, the number of the event it comes from (-1 for a new one) and what differs from that.
    // `text` is what `take` got, when it holds numbers that JavaScript spells otherwise.
    give(text) {
      const numbers = new Map();
      for (const [event, was] of given) if (event.event_id !== undefined) numbers.set(event.event_id, was);
      let originals = null;
      let same = batch.length === given.size;
      const told = batch.map((event, place) => {
        const was = given.get(event) ?? numbers.get(event.event_id);
        const route = routes.get(event);
        if (was === undefined) {
          same = false;
          return [-1, { event, route }];
        }
        const now = fields(event, was.at(-1));
        const differs = {};
        const names = ["before", "after", "tags", "op", "ts_ms", "db", "schema", "table", "synthetic"];
        names.forEach((name, column) => {
          if (now[column] === was[column]) return;
          differs[name] = now[column] ?? null;
          if (text !== null && (column === 0 || column === 1)) {
            originals ??= parse(text, spelled);
            differs[name] = stringify(respelled(event[name], originals[was.at(-1)][name])) ?? "null";
          }
        });
        if (route !== undefined) differs.route = route;
        if (was.at(-1) !== place || Object.keys(differs).length > 0) same = false;
        return [was.at(-1), differs];
      });
      batch = [];
      given = new Map();
      return same ? null : stringify(told);
    },
  };
})();
