// The environment of a user's script, and the functions that pass events to it and back.
//
// Evaluated once per engine, before the script; the engine calls the functions of the last expression. A
// script gets native events, each with `table`, `timestamp` and `route` in addition. It returns
// events: the same objects, copies (`{...event}`), or new ones. The output is reported as differences from
// the input, so that a field which the script did not change stays byte-identical.
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
  globalThis.setTimeout = undefined; // provided by the library; scripts have no timers
  globalThis.clearTimeout = undefined;
  BigInt.prototype.toJSON = function () {
    return rawJSON(this.toString());
  };

  // Keeps the spelling of numbers that JavaScript would write differently (1.10, 12345678901234567890).
  const spelled = (_, value, { source }) =>
    typeof value === "number" && source !== String(value) ? rawJSON(source) : value;

  // `value`, with the spelling of `original` for numbers that have not changed.
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

  // The events that a call returned: an array, a single event, or nothing for the events it was given.
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
    // Accept a batch: the JSON text of an array of native events.
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

    // Return the result: null if nothing changed, otherwise the JSON text of an array with, for each
    // event, the number of the event that it comes from (-1 for a new one) and the differences from it.
    // `text` is the argument of `take` if JavaScript may spell its numbers differently, otherwise null.
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
