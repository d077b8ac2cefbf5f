import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { bytesText, countText } from "./data.js";

export function Charts(props) {
  const { chart, setChart, model } = props;
  return (
    <section class="charts" aria-label="charts">
      <div class="tabs" role="tablist">
        {["memory", "roofline"].map((name) => (
          <button role="tab" aria-selected={chart === name} class={chart === name ? "on" : ""} onClick={() => setChart(name)}>{name === "memory" ? "Memory" : "Roofline"}</button>
        ))}
        <span class="quiet">{chart === "memory" ? memoryText(model, props.step) : roofText(model, props.step)}{chart === "memory" && <span class="hint"> · click to go to an equation</span>}</span>
      </div>
      {chart === "memory" ? <Memory {...props} /> : <Roofline {...props} />}
    </section>
  );
}

// The steps that a chart draws. Steps before the programs are drawn as if their ops ran one by one.
const drawnText = (model, step) => {
  const names = model.drawn(step).map((at) => model.data.steps[at].name).join(", then ");
  const what = model.data.steps[step].kind === "program" ? `the ${names}${names === "program" ? " that runs" : ""}` : `${names}, op by op`;
  return model.data.runs.length > 1 ? `run ${model.data.steps[step].run + 1} · ${what}` : what;
};

const memoryText = (model, step) => memoryParts(model, step, model.memory(step));
const memoryParts = (model, step, memory) => [
  drawnText(model, step),
  `peak ${bytesText(memory.peak)}`,
  `residuals ${bytesText(memory.residuals)}`,
  memory.unknown && `${memory.unknown} sizes depend on data and are counted as 1`,
  memory.unseen && `without what ${memory.unseen} ${memory.unseen > 1 ? "calls of executors allocate" : "call of an executor allocates"} inside`,
].filter(Boolean).join(" · ");

const MODULES = 14;
const PALETTE = 6; // colours of the style sheet; more modules are a ramp of hues
const BYTES = Array.from({ length: 40 }, (_, k) => 2 ** k); // distances of ticks

// Live bytes over the programs in parts: what is saved for the backward, the modules whose bytes live longest, the rest.
function stacks(memory, modules) {
  const { buffers, kinds, length } = memory;
  const named = buffers.some((one) => modules[one[5]]);
  const families = memory.names.map((name) => name.replace(/^aten\.|\.\w+$/g, "")); // where there are no modules: the op
  const short = modules.map((name) => name.split(".", 2).join("."));
  const top = (one) => (named ? short[one[5]] : families[one[4]]);
  const area = new Map();
  const born = new Map();
  for (const one of buffers) {
    const name = top(one);
    born.set(name, Math.min(born.get(name) ?? Infinity, one[0]));
    if (kinds[one[3]] !== "input" && kinds[one[3]] !== "residual") area.set(name, (area.get(name) ?? 0) + one[2] * (one[1] - one[0] + 1));
  }
  const most = [...area].filter(([name]) => name).sort((a, b) => b[1] - a[1]).slice(0, MODULES).map(([name]) => name);
  const largest = most.sort((a, b) => born.get(a) - born.get(b)); // in the order in which they run
  const inOther = (one) => !["input", "residual"].includes(kinds[one[3]]) && !largest.includes(top(one));
  const names = [...(memory.residuals ? ["saved for backward"] : []), ...largest, ...(buffers.some(inOther) ? ["other"] : [])];
  const partOf = (one) => {
    if (kinds[one[3]] === "residual") return "saved for backward";
    return largest.includes(top(one)) ? top(one) : "other";
  };
  const parts = new Map(names.map((name) => [name, new Float64Array(length + 1)]));
  for (const one of buffers) {
    if (kinds[one[3]] === "input") continue;
    const part = parts.get(partOf(one));
    part[one[0]] += one[2];
    part[Math.min(one[1], length - 1) + 1] -= one[2];
  }
  const sums = [];
  let below = new Float64Array(length + 1);
  for (const name of names) {
    const [change, line] = [parts.get(name), new Float64Array(length + 1)];
    for (let i = 0, live = 0; i < length; i++) line[i] = below[i] + (live += change[i]);
    line[length] = line[Math.max(0, length - 1)]; // an equation's bar reaches to where the next one begins, the last one's too
    sums.push(line);
    below = line;
  }
  return { names, sums };
}

function Memory({ model, step, node, reveal, theme }) {
  const box = useRef(null);
  const plot = useRef(null);
  const memory = model.memory(step);
  const { names, sums } = useMemo(() => stacks(memory, model.data.modules), [memory]);
  const { length, starts } = memory;
  const most = Math.max(...besides(model, step).map((at) => model.memory(at).peak)); // steps that are compared have one scale
  const half = model.drawn(step).indexOf(step);
  const sent = useMemo(() => collectives(model, step), [memory]);
  const mostSent = Math.max(1, ...sent.map(([, bytes]) => bytes));
  const totalSent = sent.reduce((sum, [, bytes]) => sum + bytes, 0);
  const marked = useRef(null);
  marked.current = useMemo(() => (node ? model.positionOf(step, node) : null), [model, step, node]);

  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const modules = names.filter((name) => name !== "saved for backward" && name !== "other");
    const hue = (k) => (modules.length <= PALETTE ? color(`--part${k}`) : `hsl(${Math.round(205 - (290 * k) / modules.length)} ${color("--ramp")})`);
    const fills = names.map((name) => (name === "saved for backward" ? color("--residual") : name === "other" ? color("--other") : hue(modules.indexOf(name))));
    const order = names.map((_, k) => names.length - 1 - k); // the highest sum is drawn first, the lower ones over it
    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = [{ label: "equation" }, ...order.map((k) => ({ label: names[k], fill: fills[k], stroke: fills[k], width: 0, paths: stepped, points: { show: false } }))];
    const line = (u, at, stroke, dash) => {
      const x = Math.round(u.valToPos(at, "x", true));
      u.ctx.save();
      u.ctx.strokeStyle = stroke;
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.setLineDash(dash);
      u.ctx.beginPath();
      u.ctx.moveTo(x, u.bbox.top);
      u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
      u.ctx.restore();
    };
    const draw = (u) => {
      for (const start of starts.slice(1)) {
        line(u, start, color("--text"), [2, 3]);
        u.ctx.fillStyle = color("--text");
        u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
        u.ctx.textAlign = "right";
        u.ctx.fillText("forward", u.valToPos(start, "x", true) - 6 * devicePixelRatio, u.bbox.top + 10 * devicePixelRatio);
        u.ctx.textAlign = "left";
        u.ctx.fillText("backward", u.valToPos(start, "x", true) + 6 * devicePixelRatio, u.bbox.top + 10 * devicePixelRatio);
      }
      const [from, to] = [starts[half], starts[half + 1] ?? length]; // the half that is not the step's is pale
      u.ctx.globalAlpha = 0.62;
      u.ctx.fillStyle = color("--panel");
      for (const [low, high] of [[0, from], [to, length]]) {
        if (low < high) u.ctx.fillRect(u.valToPos(low, "x", true), u.bbox.top, u.valToPos(high, "x", true) - u.valToPos(low, "x", true), u.bbox.height);
      }
      u.ctx.globalAlpha = 1;
      if (marked.current !== null) line(u, marked.current + 0.5, color("--accent"), []);
      u.ctx.fillStyle = color("--send");
      for (const [at, bytes] of sent) {
        const tall = (6 + 22 * (bytes / mostSent)) * devicePixelRatio;
        u.ctx.fillRect(u.valToPos(at, "x", true), u.bbox.top + u.bbox.height - tall, Math.max(2 * devicePixelRatio, u.bbox.width / length), tall);
      }
      const { peak, peakAt } = memory;
      u.ctx.fillStyle = color("--text");
      u.ctx.beginPath();
      u.ctx.arc(u.valToPos(peakAt + 0.5, "x", true), u.valToPos(peak, "y", true), 3 * devicePixelRatio, 0, 7);
      u.ctx.fill();
    };
    const under = (u) => (u.cursor.left < 0 ? null : Math.min(length - 1, Math.max(0, Math.floor(u.posToVal(u.cursor.left, "x")))));
    const options = {
      width: box.current.clientWidth, height: 164, series,
      padding: [10, 12, 0, 0],
      cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
      legend: { show: true, live: false },
      scales: { x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 1)] }, y: { range: (_, low, high) => [0, (Math.max(most, high) || 1) * 1.14] } },
      axes: [
        { label: "equation", labelSize: 14, labelGap: 0, labelFont: "11px system-ui", stroke: color("--quiet"), grid: { show: false }, ticks: { show: false }, size: 22, font: "11px system-ui", values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) && (tick < length || !length) ? tick : "")) },
        { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, size: 60, label: "live bytes", labelSize: 16, labelGap: 0, labelFont: "11px system-ui", font: "11px system-ui", incrs: BYTES, values: (_, ticks) => ticks.map(bytesText) },
      ],
      hooks: {
        draw: [draw],
        ready: [(u) => u.over.addEventListener("click", () => {
          const at = under(u);
          const found = at !== null && model.atPosition(step, at);
          if (found) reveal(found.step, found.node);
        })],
        setCursor: [(u) => {
          const at = under(u);
          const found = at === null ? null : model.atPosition(step, at);
          tip.textContent = found ? `${at}  ${model.op(found.node).name}  ${model.module(found.step, found.node)}  ${bytesText(sums.at(-1)[at])}` : "";
        }],
      },
    };
    const tip = document.createElement("div");
    tip.className = "tip";
    const u = new uPlot(options, [Float64Array.from({ length: length + 1 }, (_, i) => i), ...order.map((k) => sums[k])], box.current);
    u.over.appendChild(tip);
    plot.current = u;
    const watch = new ResizeObserver(() => u.setSize({ width: box.current.clientWidth, height: 164 }));
    watch.observe(box.current);
    return () => {
      watch.disconnect();
      u.destroy();
    };
  }, [memory, step, theme]);
  useEffect(() => plot.current?.redraw(false), [marked.current]);
  return (
    <div class="memory" ref={box} data-testid="memory">
      {sent.length > 0 && <span class="sends"><i /> {sent.length} collectives send {bytesText(totalSent)}</span>}
    </div>
  );
}

// The step, and those of the other run that have the same part in it.
const besides = (model, step) => model.data.steps.flatMap((one, at) => (at === step || one.across?.before === step || model.data.steps[step].across?.before === at ? [at] : []));

// Positions on the timeline where values go to other ranks, and how many bytes.
function collectives(model, step) {
  const found = [];
  const { starts } = model.memory(step);
  model.drawn(step).forEach((at, number) => {
    model.runningIn(at).forEach((node, position) => {
      const { sent } = model.cost(node);
      if (sent) found.push([starts[number] + position, sent]);
    });
  });
  return found;
}

const roofText = (model, step) => `${drawnText(model, step)} · ${peaksText(model.run(step))}`;
const peaksText = ({ machine }) => (machine ? `${machine[0]}: ${countText(machine[1])}FLOP/s, ${bytesText(machine[2])}/s` : "the machine's peaks are not known: pass machine=inspect.measured_machine()");

function Roofline({ model, step, reveal }) {
  const { machine } = model.run(step);
  const points = useMemo(() => byOp(model, step), [model, step]);
  const box = useRef(null);
  const [width, setWidth] = useState(900);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(() => setWidth(Math.max(200, box.current.clientWidth))); // letters keep their size
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const [height, left, bottom] = [180, width < 600 ? 30 : 64, 31];
  const xs = points.map((one) => one.flops / one.bytes);
  const low = Math.min(-2, Math.floor(Math.log10(Math.min(...xs, machine ? 1 : 0.1))));
  const high = Math.ceil(Math.log10(Math.max(...xs, machine ? (machine[1] / machine[2]) * 4 : 10)));
  const reach = (x) => (machine ? Math.min(machine[1], x * machine[2]) : null);
  const value = (one) => (machine ? reach(one.flops / one.bytes) : one.flops);
  const top = Math.ceil(Math.log10(Math.max(...points.map(value), machine ? machine[1] : 1, 1)));
  const base = Math.floor(Math.log10(Math.max(1, Math.min(...points.map(value), machine ? reach(10 ** low) : Infinity))));
  const px = (x) => left + ((Math.log10(x) - low) / (high - low || 1)) * (width - left - 16);
  const py = (y) => 30 + (1 - (Math.log10(y) - base) / (top - base || 1)) * (height - bottom - 30);
  const most = Math.max(...points.map((one) => one.weight), 1e-30);
  const radius = (one) => 3 + 9 * Math.sqrt(one.weight / most);
  const ticks = Array.from({ length: high - low + 1 }, (_, k) => low + k);
  const ridge = machine && machine[1] / machine[2];
  return (
    <svg ref={box} class="roofline" viewBox={`0 0 ${width} ${height}`} role="group" aria-label="roofline" data-testid="roofline">
      {ticks.map((tick) => [
        <line x1={px(10 ** tick)} x2={px(10 ** tick)} y1="10" y2={height - bottom} class="grid" />,
        <text x={px(10 ** tick)} y={height - bottom + 14} text-anchor="middle">{tick < 0 ? (10 ** tick).toFixed(-tick) : countText(10 ** tick)}</text>,
      ])}
      <text x={width - 16} y={height - 2} text-anchor="end">FLOP per byte</text>
      <text x="4" y="12">{machine ? `FLOP/s, at most ${countText(machine[1])}` : "FLOP"}</text>
      {machine && <path class="roof" d={`M${px(10 ** low)} ${py(reach(10 ** low))}L${px(ridge)} ${py(machine[1])}L${px(10 ** high)} ${py(machine[1])}`} />}
      {points.map((one) => (
        <circle tabIndex={0} role="button" aria-label={`${one.name}, ${one.times} times`} onKeyDown={(event) => event.key === "Enter" && (event.stopPropagation(), reveal(one.step, one.node))} cx={px(one.flops / one.bytes)} cy={py(value(one))} r={radius(one)} onClick={() => reveal(one.step, one.node)}>
          <title>{`${one.name}\n${one.times} times, ${countText(one.flops)} FLOP, ${bytesText(one.bytes)}\n${(one.flops / one.bytes).toFixed(2)} FLOP per byte${machine ? `, at least ${(one.weight * 1e6).toFixed(1)} µs` : ""}`}</title>
        </circle>
      ))}
      {labels(points.map((one) => ({ text: one.name.replace(/^aten\.|\.\w+$/g, ""), x: px(one.flops / one.bytes), y: py(value(one)) - radius(one) - 4, radius: radius(one) })))}
    </svg>
  );
}

// Names of the dearest ops, where there is room for them.
function labels(wanted) {
  const placed = [];
  for (const [at, one] of wanted.slice(0, 24).entries()) {
    const half = 3.3 * one.text.length;
    const onCircle = wanted.slice(0, at).some((other) => Math.abs(other.x - one.x) < half + other.radius && Math.abs(other.y + other.radius + 8 - one.y) < other.radius + 8);
    const box = { ...one, low: one.x - half, high: one.x + half };
    const isFree = placed.every((other) => Math.abs(other.y - box.y) > 12 || other.high < box.low || other.low > box.high);
    if (isFree && !onCircle && placed.length < 9) placed.push(box);
  }
  return placed.map((one) => <text class="name" x={one.x} y={one.y} text-anchor="middle">{one.text}</text>);
}

// The ops of what is drawn, dearest first.
function byOp(model, step) {
  const { machine } = model.run(step);
  const found = new Map();
  for (const program of model.drawn(step)) {
    const flat = model.flat(program);
    for (const i of flat.leaves) {
      const node = flat.nodes[i];
      const { flops, bytes } = model.cost(node);
      if (!flops || !bytes) continue;
      const name = model.op(node).name;
      const known = found.get(name) ?? { name, step: program, node, times: 0, flops: 0, bytes: 0 };
      known.times += 1;
      known.flops += flops;
      known.bytes += bytes;
      found.set(name, known);
    }
  }
  const points = [...found.values()];
  for (const one of points) one.weight = machine ? Math.max(one.flops / machine[1], one.bytes / machine[2]) : one.bytes;
  return points.sort((a, b) => b.weight - a.weight).slice(0, 60);
}
