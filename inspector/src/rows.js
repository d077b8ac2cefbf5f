// Which rows a step shows, and how an equation reads.

export const pathOf = (flat, node) => {
  const path = [];
  for (let at = node; at; at = flat.nodes[at.parent]) path.unshift(at.position);
  return path.join(".");
};

export const nodeAt = (flat, path) => {
  const wanted = path.split(".").map(Number);
  let [from, to, parent] = [0, flat.nodes.length, -1];
  let found = null;
  for (const position of wanted) {
    found = null;
    for (let i = from; i < to; i = flat.nodes[i].end) {
      if (flat.nodes[i].position === position && flat.nodes[i].parent === parent) {
        found = flat.nodes[i];
        break;
      }
    }
    if (!found) return null;
    [from, to, parent] = [found.i + 1, found.end, found.i];
  }
  return found;
};

export const hasInside = (node) => node.end > node.i + 1;

// Nodes that are open at first: levels are opened while everything fits on a screen.
export const openAtFirst = (flat, limit = 44) => {
  let open = new Set();
  for (let depth = 0; depth < 12; depth++) {
    const next = new Set(open);
    for (const node of flat.nodes) if (node.depth <= depth && hasInside(node) && node.live) next.add(node.i);
    if (next.size === open.size) break;
    if (countVisible(flat, next) > limit) {
      const tops = flat.nodes.filter((node) => node.depth === depth && hasInside(node) && (depth === 0 || open.has(node.parent)));
      const whole = tops.filter((node) => node.le - node.ls > 0.8 * flat.leaves.length);
      if (whole.length === 1) {
        open.add(whole[0].i);
        continue;
      }
      break;
    }
    open = next;
  }
  return open;
};

const MANY = 44; // rows of a program that are shown one by one

// A program's equations that stand together and belong to one module: from the first to the one after the last.
export const groupsOf = (model, step) => {
  model.groups ??= [];
  if (model.groups[step]) return model.groups[step];
  const flat = model.flat(step);
  const found = new Map();
  const tops = model.data.steps[step].kind === "program" ? flat.nodes.filter((node) => node.depth === 0) : [];
  if (tops.length > MANY) {
    const names = tops.map((node) => model.module(step, node).split(".", 2).join("."));
    for (let k = 0; k < tops.length; ) {
      let last = k;
      while (names[last + 1] === names[k]) last++;
      if (last > k && names[k]) found.set(tops[k].i, { module: names[k], count: last - k + 1, end: tops[last].end, ls: tops[k].ls, le: tops[last].le });
      k = last + 1;
    }
  }
  return (model.groups[step] = found);
};

// The key of the group around a node; undefined where there is none.
export const groupAround = (model, step, node) => {
  for (const [first, group] of groupsOf(model, step)) if (first <= node.i && node.i < group.end) return `m${first}`;
};

export const keyOfRow = (row) => (row.kind === "group" ? `m${row.i}` : row.kind === "node" ? row.i : null);

const countVisible = (flat, open) => {
  let count = 0;
  for (let i = 0; i < flat.nodes.length; count++) i = open.has(i) ? i + 1 : flat.nodes[i].end;
  return count;
};

export const rowsOf = (model, step, open, showInputs) => {
  const flat = model.flat(step);
  const { gone } = model.changes(step);
  const rows = [{ kind: "inputs" }];
  if (showInputs) flat.roots.forEach((value, at) => rows.push({ kind: "root", value, at }));
  const ghosts = (place, depth) => {
    for (const leaf of gone.get(place) ?? []) rows.push({ kind: "ghost", leaf, depth });
  };
  const groups = groupsOf(model, step);
  let [shown, groupEnd] = [-1, -1];
  let i = 0;
  while (i < flat.nodes.length) {
    const node = flat.nodes[i];
    const group = groups.get(i);
    if (group) {
      if (node.ls > shown) ghosts(node.ls, 0);
      shown = Math.max(shown, node.ls);
      rows.push({ kind: "group", i, group });
      if (!open.has(`m${i}`)) {
        shown = Math.max(shown, group.le - 1);
        i = group.end;
        continue;
      }
      groupEnd = group.end;
    }
    if (node.live && node.ls > shown) {
      ghosts(node.ls, node.depth);
      shown = node.ls;
    }
    rows.push({ kind: "node", i, inGroup: i < groupEnd });
    if (open.has(i)) i += 1;
    else {
      if (node.le > node.ls) shown = Math.max(shown, node.le - 1);
      i = node.end;
    }
  }
  ghosts(flat.leaves.length, 0);
  rows.push({ kind: "return" });
  return rows;
};

// A program's Python, line by line.
export const textRows = (text) => text.trimEnd().split("\n").map((line, at) => ({ kind: "text", line, at }));

export const textOf = (model, step, node) => {
  const flat = model.flat(step);
  const name = (value) => flat.values.get(value)?.name ?? value;
  const arg = (one) => (typeof one === "number" ? name(one) : Array.isArray(one) ? `(${one.map(arg).join(", ")})` : one);
  const parts = [...node.args.map(arg), ...(node.kwargs ?? []).map(([key, one]) => `${key}=${arg(one)}`)];
  return `${node.outs.map(name).join(", ")} = ${model.op(node).name}(${parts.join(", ")})`;
};

// The nodes that a query is found in: op, names, module, types and the user's line.
export const search = (model, step, query) => {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return [];
  const flat = model.flat(step);
  const found = [];
  for (const node of flat.nodes) {
    if (node.label) continue;
    const source = model.source(node);
    const where = source ? `${source.path}:${source.line} ${source.text}` : "";
    const types = node.outs.map((value) => model.type(flat, value)).join(" ");
    const names = node.outs.map((value) => flat.values.get(value)?.name ?? "").join(" ");
    const text = `${model.op(node).name} ${names} ${types} ${model.module(step, node)} ${where}`.toLowerCase();
    if (text.includes(wanted)) found.push(node.i);
  }
  return found;
};
