// What a page is given, and what follows from it: steps unfolded, values followed from step to step.
// Leaves and values are numbered as thunder_fn/inspect/flat.py numbers them.

export async function load(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const INNER = 2 ** 30; // values of the bodies of loops and choices, which nothing outside reads

// One step, unfolded: `nodes` in preorder (`end` is the node after the subtree), `leaves` as indices of nodes.
function unfold(data, step) {
  const nodes = [];
  const leaves = [];
  const values = new Map();
  const held = new Map();
  let count = 0;
  let inner = INNER;

  const fresh = (type, name, maker, live) => {
    const id = live ? count++ : inner++;
    values.set(id, { id, type, name, maker, uses: [] });
    return id;
  };
  const bind = (body, inputs, live) => {
    const env = inputs.slice();
    for (const [type, tensor] of body[2]) {
      if (!held.has(tensor)) held.set(tensor, fresh(type, `constant${held.size}`, -1, live));
      env.push(held.get(tensor));
    }
    return env;
  };
  const read = (arg, env, operands) => {
    if (typeof arg === "number") {
      operands.push(env[arg]);
      return env[arg];
    }
    return Array.isArray(arg) ? arg.map((item) => read(item, env, operands)) : arg;
  };

  const walk = (number, env, depth, parent, prefix, live) => {
    const body = data.bodies[number];
    let made = 0;
    body[3].forEach((eq, position) => {
      const [, args, kwargs, types, , inline, own] = eq;
      const operands = [];
      const node = { i: nodes.length, eq, depth, parent, position, live, ls: leaves.length, le: 0, end: 0, outs: [] };
      node.args = args.map((arg) => read(arg, env, operands));
      node.kwargs = kwargs ? kwargs.map(([key, arg]) => [key, read(arg, env, operands)]) : [];
      node.operands = operands;
      nodes.push(node);
      const names = types.map((_, k) => (prefix === "" ? `v${env.length + k}` : `${prefix}.${made + k + 1}`));
      const inside = names[0] ?? `${prefix}e${position}`;
      if (inline >= 0) {
        const target = data.bodies[inline];
        const within = bind(target, operands, live);
        walk(inline, within, depth + 1, node.i, inside, live);
        node.outs = target[4].map((atom) => (typeof atom === "number" ? within[atom] : atom));
        node.outs.forEach((value, k) => {
          const known = values.get(value);
          if (known && known.maker >= node.i) known.name = names[k];
        });
      } else {
        node.outs = types.map((type, k) => fresh(type, names[k], node.i, live));
        for (const value of new Set(operands)) values.get(value)?.uses.push(node.i);
        if (live) leaves.push(node.i);
        if (own) own.forEach((one, k) => bodyOf(one, k, own.length, node, inside));
      }
      made += types.length;
      node.le = leaves.length;
      node.end = nodes.length;
      env.push(...node.outs);
    });
  };
  const bodyOf = (number, k, total, owner, prefix) => {
    const body = data.bodies[number];
    const label = { i: nodes.length, body: number, depth: owner.depth + 1, parent: owner.i, position: k, live: false };
    Object.assign(label, { label: total > 1 ? `body ${k}` : "body", ls: leaves.length, outs: [], operands: [], args: [] });
    nodes.push(label);
    const inputs = body[1].map((type, i) => fresh(type, `${prefix}:${k}.x${i}`, -1, false));
    label.inputs = inputs;
    const env = bind(body, inputs, false);
    walk(number, env, owner.depth + 2, label.i, `${prefix}:${k}`, false);
    label.outs = body[4].map((atom) => (typeof atom === "number" ? env[atom] : atom));
    for (const value of label.outs) if (values.has(value)) values.get(value).isGiven = true;
    label.le = leaves.length;
    label.end = nodes.length;
  };

  const body = data.bodies[step.body];
  const inputs = body[1].map((type, i) => fresh(type, `v${i}`, -1, true));
  const env = bind(body, inputs, true);
  const roots = env.slice();
  roots.forEach((value, i) => (values.get(value).name = `v${i}`));
  walk(step.body, env, 0, -1, "", true);
  const outputs = body[4].map((atom) => (typeof atom === "number" ? env[atom] : atom));
  return { nodes, leaves, values, roots, outputs, numInputs: inputs.length, name: body[0] };
}

export class Model {
  constructor(data) {
    this.data = data;
    this.flats = data.steps.map(() => null);
    this.links = data.steps.map(() => null);
    this.sums = data.steps.map(() => null);
    this.running = data.steps.map(() => null);
  }

  flat(step) {
    this.flats[step] ??= unfold(this.data, this.data.steps[step]);
    return this.flats[step];
  }

  run(step) {
    return this.data.runs[this.data.steps[step].run];
  }

  // The changes that are marked in a step: against the other run, or against the step before; none for a first step.
  changed(step) {
    const { across, own } = this.data.steps[step];
    return across ?? own ?? {};
  }

  // The values of a step that are equal to those of the steps that it is compared with, both ways.
  linksOf(step) {
    const { across, own } = this.data.steps[step];
    return (this.links[step] ??= [own, across].filter(Boolean).map((changes) => this.link(step, changes)));
  }

  link(step, { before, matches, inputs }) {
    const [old, now] = [this.flat(before), this.flat(step)];
    const up = new Map();
    const down = new Map();
    const join = (theirs, mine) => {
      if (typeof mine !== "number" || typeof theirs !== "number") return;
      up.set(mine, theirs);
      if (!down.has(theirs)) down.set(theirs, mine);
    };
    for (const [theirs, mine] of inputs) join(theirs, mine);
    matches.forEach((at, leaf) => {
      if (at < 0) return;
      const [a, b] = [old.nodes[old.leaves[at]], now.nodes[now.leaves[leaf]]];
      b.outs.forEach((value, k) => k < a.outs.length && join(a.outs[k], value));
    });
    return { before, up, down };
  }

  // Where a value is in every step: a list with a value or undefined for each.
  follow(step, value) {
    const found = this.data.steps.map(() => undefined);
    const pending = [[step, value]];
    while (pending.length) {
      const [at, one] = pending.pop();
      if (one === undefined || found[at] !== undefined) continue;
      found[at] = one;
      for (const { before, up } of this.linksOf(at)) pending.push([before, up.get(one)]);
      this.data.steps.forEach((_, t) => {
        for (const { before, down } of this.linksOf(t)) if (before === at) pending.push([t, down.get(one)]);
      });
      const [forward, backward] = this.halves(at);
      for (const [mine, its] of this.run(at).saved) {
        if (at === forward && mine === one) pending.push([backward, its]);
        if (at === backward && its === one) pending.push([forward, mine]);
      }
    }
    return found;
  }

  // The steps of a run of one kind.
  ofKind(step, kind) {
    const { run } = this.data.steps[step];
    return this.data.steps.flatMap((one, i) => (one.kind === kind && one.run === run ? [i] : []));
  }

  halves(step) {
    const split = this.ofKind(step, "split");
    return split.length === 2 ? split : [-1, -1];
  }

  isSaved(step, value) {
    const [forward, backward] = this.halves(step);
    return this.run(step).saved.some(([mine, its]) => (step === forward && mine === value) || (step === backward && its === value));
  }

  // Running counts of changes over the leaves of a step.
  changes(step) {
    if (this.sums[step]) return this.sums[step];
    const { status, removed } = this.changed(step);
    const count = this.flat(step).leaves.length;
    const sum = (test) => {
      const found = new Int32Array(count + 1);
      for (let i = 0; i < count; i++) found[i + 1] = found[i] + (status && test(status[i]) ? 1 : 0);
      return found;
    };
    const gone = new Map();
    for (const [leaf, place] of removed ?? []) {
      if (!gone.has(place)) gone.set(place, []);
      gone.get(place).push(leaf);
    }
    const before = new Int32Array(count + 2);
    for (let i = 0; i <= count; i++) before[i + 1] = before[i] + (gone.get(i)?.length ?? 0);
    return (this.sums[step] = { added: sum((s) => s === "a"), changed: sum((s) => s === "c"), gone, before });
  }

  // How many leaves under a node were added, changed and removed.
  changesIn(step, node) {
    const { added, changed, before } = this.changes(step);
    const { ls, le } = node;
    return [added[le] - added[ls], changed[le] - changed[ls], le > ls ? before[le] - before[ls + 1] : 0];
  }

  module(step, node) {
    const { data } = this;
    const modules = data.steps[step].modules;
    if (!node.live) return this.innerModule(step, node);
    if (node.le === node.ls) return data.modules[data.sources[node.eq?.[4]]?.[3]] ?? "";
    const first = data.modules[modules[node.ls]];
    const last = data.modules[modules[node.le - 1]];
    if (first === last) return first;
    const [a, b] = [first.split("."), last.split(".")];
    let k = 0;
    while (k < a.length && a[k] === b[k]) k++;
    return a.slice(0, k).join(".");
  }

  // Inside loops and choices: bodies are shared by calls, so paths there go on from the call.
  innerModule(step, node) {
    const found = node.eq && this.data.sources[node.eq[4]];
    const around = this.flat(step).nodes[node.parent];
    if (found && found[4] < 0) return this.data.modules[found[3]];
    const inside = found ? this.data.modules[found[4]] : "";
    return [around ? this.module(step, around) : "", inside].filter(Boolean).join(".");
  }

  source(node) {
    const found = node.eq && this.data.sources[node.eq[4]];
    if (!found) return null;
    const [file, line, fn, module] = found;
    const path = this.data.files[file];
    if (!path) return null; // a line of PyTorch
    return { file, line, fn, path, module: this.data.modules[module], text: this.data.lines[file]?.[line]?.trim() ?? "" };
  }

  // The user's line of a node, or of the nearest one around it that has one.
  nearestSource(flat, node) {
    for (let at = node; at; at = flat.nodes[at.parent]) {
      const found = this.source(at);
      if (found) return found;
    }
    return null;
  }

  op(node) {
    const [name, kind] = node.eq ? this.data.ops[node.eq[0]] : [node.label, 2];
    return { name, kind: ["leaf", "composite", "structured"][kind] };
  }

  cost(node) {
    const [flops, bytes, sent] = node.eq ? this.data.costs[node.eq[7]] : [0, 0, 0];
    return { flops, bytes, sent };
  }

  claim(node) {
    return node.eq && node.eq[8] >= 0 ? this.data.claims[node.eq[8]] : null;
  }

  type(flat, value) {
    const known = flat.values.get(value);
    return known ? this.data.types[known.type][0] : "";
  }

  bytes(flat, value) {
    const known = flat.values.get(value);
    return known ? this.data.types[known.type][1] : 0;
  }

  // The programs of the run of a step.
  programs(step) {
    return this.ofKind(step, "program");
  }

  // The steps that run one after the other on a step's timeline, itself among them: both halves of a split, both programs.
  drawn(step) {
    const { kind } = this.data.steps[step];
    return kind === "split" || kind === "program" ? this.ofKind(step, kind) : [step];
  }

  // A step's timeline of memory.
  memory(step) {
    return this.data.memories[this.data.steps[step].memory];
  }

  // What runs at the positions of a timeline: the outermost equations of a program, the leaves of another step.
  runningIn(step) {
    const flat = this.flat(step);
    const isProgram = this.data.steps[step].kind === "program";
    return (this.running[step] ??= isProgram ? flat.nodes.filter((node) => node.depth === 0) : flat.leaves.map((i) => flat.nodes[i]));
  }

  // The equation that runs at a position of the step's timeline.
  atPosition(step, position) {
    const { starts } = this.memory(step);
    const number = starts.length > 1 && position >= starts[1] ? 1 : 0;
    const at = this.drawn(step)[number];
    const node = this.runningIn(at)[position - starts[number]];
    return node ? { step: at, node } : null;
  }

  // The position on the step's timeline of one of its nodes.
  positionOf(step, node) {
    if (!node.live || node.le === node.ls) return null;
    const start = this.memory(step).starts[this.drawn(step).indexOf(step)];
    if (this.data.steps[step].kind !== "program") return start + node.ls;
    const { nodes, leaves } = this.flat(step);
    let top = nodes[leaves[node.ls]];
    while (top.parent >= 0) top = nodes[top.parent];
    return start + top.position;
  }
}

export const bytesText = (count) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(count) < 1024 || unit === "GiB") return unit === "B" ? `${count} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
};

export const countText = (count) => {
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (Math.abs(count) < 1000 || unit === "T") return unit ? `${count.toFixed(1)} ${unit}` : `${Math.round(count)}`;
    count /= 1000;
  }
};

export const msText = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`);

export const timeText = (seconds) =>
  seconds >= 1e-3 ? msText(seconds * 1e3) : seconds >= 1e-6 ? `${(seconds * 1e6).toFixed(1)} µs` : `${Math.ceil(seconds * 1e9)} ns`;
