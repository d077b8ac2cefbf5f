import { bytesText, countText, timeText } from "./data.js";
import { hasInside, pathOf } from "./rows.js";
import { useState } from "preact/hooks";
import { Label, Text, Values, argumentName, labelOf, loopParts, madeInside } from "./table.jsx";

export function Details(props) {
  const { node, value } = props;
  return (
    <aside aria-label="details" tabIndex={0}>
      {value !== null && <Variable {...props} />}
      {node ? <Equation {...props} /> : value === null && <Summary {...props} />}
    </aside>
  );
}

function Summary({ model, step }) {
  const { runs, steps } = model.data;
  const one = steps[step];
  const cost = model.flat(step).nodes.filter((node) => node.depth === 0 && node.eq).map((node) => model.cost(node));
  const sum = (key) => cost.reduce((total, spent) => total + spent[key], 0);
  return (
    <section>
      <h2>{one.name}</h2>
      <dl>
        <dt>computes</dt><dd>{countText(sum("flops"))} FLOP</dd>
        <dt>moves</dt><dd>{bytesText(sum("bytes"))}</dd>
        {sum("sent") > 0 && [<dt>sends</dt>, <dd>{bytesText(sum("sent"))}</dd>]}
      </dl>
      {runs.length > 1 ? <Beside model={model} /> : <Programs model={model} run={runs[0]} />}
      <Profiles runs={runs} />
      <p class="quiet">Select an equation to see where it comes from and who runs it. Click a variable to follow it through all steps.</p>
    </section>
  );
}

function Programs({ model, run: { memory: number, machine, measured } }) {
  const memory = model.data.memories[number];
  return (
    <div>
      <h2>The programs</h2>
      <dl>
        {measured && [<dt>a call</dt>, <dd>{timeText(measured[0])}<span class="quiet"> the median of {measured[1]}</span></dd>]}
        {measured?.[4] > 0 && [<dt>its device</dt>, <dd>{timeText(measured[3])}<span class="quiet"> busy, in {measured[4]} kernels and copies</span></dd>]}
        <dt>peak</dt><dd>{bytesText(memory.peak)}{memory.unseen > 0 && <span class="quiet"> and what {memory.unseen > 1 ? `${memory.unseen} calls of executors allocate` : "1 call of an executor allocates"} inside, which nobody knows</span>}</dd>
        <dt>residuals</dt><dd>{bytesText(memory.residuals)}</dd>
        <dt>outputs</dt><dd>{bytesText(memory.outputs)}</dd>
        <dt>arguments</dt><dd>{bytesText(memory.inputs)}</dd>
        {machine && [<dt>machine</dt>, <dd>{machine[0]}</dd>]}
      </dl>
    </div>
  );
}

// Two runs: what their programs cost, and the ops of which one has more.
function Beside({ model }) {
  const found = model.data.runs.map((run, k) => totals(model, run, model.data.steps.findIndex((step) => step.run === k)));
  const measures = [
    ["a call", "measured", timeText], ["its device", "device", timeText], ["roofline", "least", timeText], ["equations", "equations", String], ["FLOP", "flops", countText],
    ["moves", "bytes", bytesText], ["sends", "sent", bytesText], ["peak", "peak", bytesText], ["residuals", "residuals", bytesText],
  ].filter(([, key]) => found.some((one) => one[key]));
  const names = [...new Set(found.flatMap((one) => [...one.ops.keys()]))];
  const count = (k, name) => found[k].ops.get(name) ?? 0;
  const others = names.filter((name) => count(0, name) !== count(1, name)).sort((a, b) => Math.abs(count(1, b) - count(0, b)) - Math.abs(count(1, a) - count(0, a)));
  return (
    <div>
      <h2>The programs beside each other</h2>
      <table class="beside">
        <thead><tr><th scope="col"><span class="unseen">measure</span></th>{model.data.runs.map((run, k) => <th scope="col">{k + 1}. {run.name}</th>)}<th scope="col">ratio</th></tr></thead>
        <tbody>{measures.map(([name, key, text]) => <tr><th scope="row">{name}</th>{found.map((one) => <td>{one[key] ? text(one[key]) : "–"}</td>)}<td>{found[0][key] && found[1][key] ? (found[1][key] / found[0][key]).toFixed(2) : ""}</td></tr>)}</tbody>
      </table>
      {others.length > 0 && (
        <table class="beside">
          <thead><tr><th scope="col">ops</th><th scope="col">1.</th><th scope="col">2.</th><th scope="col"><span class="unseen">difference</span></th></tr></thead>
          <tbody>{others.slice(0, 12).map((name) => <tr><th scope="row" class="mono">{name.replace(/^aten\.|\.default$/g, "")}</th><td>{count(0, name)}</td><td>{count(1, name)}</td><td>{(count(1, name) > count(0, name) ? "+" : "−") + Math.abs(count(1, name) - count(0, name))}</td></tr>)}</tbody>
        </table>
      )}
    </div>
  );
}

function totals(model, run, first) {
  const total = { equations: 0, flops: 0, bytes: 0, sent: 0, ops: new Map(), peak: model.data.memories[run.memory].peak, residuals: model.data.memories[run.memory].residuals, measured: run.measured?.[0], device: run.measured?.[3] };
  for (const step of model.programs(first)) {
    const flat = model.flat(step);
    total.equations += flat.leaves.length;
    for (const node of flat.nodes) {
      if (node.depth === 0 && node.eq) for (const key of ["flops", "bytes", "sent"]) total[key] += model.cost(node)[key];
    }
    for (const i of flat.leaves) {
      const { name } = model.op(flat.nodes[i]);
      total.ops.set(name, (total.ops.get(name) ?? 0) + 1);
    }
  }
  if (run.machine) total.least = Math.max(total.flops / run.machine[1], total.bytes / run.machine[2]);
  return total;
}

// Profiles of PyTorch's profiler, which Perfetto opens. They are handed from this page to its; nothing is sent to a server.
function Profiles({ runs }) {
  const measured = runs.filter((run) => run.measured);
  return measured.map((run) => (
    <p class="profile">
      Profile{measured.length > 1 ? ` of ${runs.indexOf(run) + 1}. ${run.name}` : ""}: <button class="link" onClick={() => openInPerfetto(run)}>open in Perfetto</button>
      {" · "}
      <a class="link" download={`${run.name}.trace.json`} href={fileOf(run)}>download</a>
    </p>
  ));
}

const fileOf = (run) => (run.file ??= URL.createObjectURL(new Blob([run.measured[2]], { type: "application/json" })));

function openInPerfetto({ name, measured }) {
  const theirs = "https://ui.perfetto.dev";
  const tab = window.open(theirs);
  if (!tab) return;
  const ask = setInterval(() => tab.postMessage("PING", theirs), 100); // until their page is there and answers
  const answer = (event) => {
    if (event.origin !== theirs || event.data !== "PONG") return;
    clearInterval(ask);
    removeEventListener("message", answer);
    tab.postMessage({ perfetto: { buffer: new TextEncoder().encode(measured[2]).buffer, title: name } }, theirs);
  };
  addEventListener("message", answer);
  setTimeout(() => clearInterval(ask), 60_000);
}

/** A dotted name, whose lines break after a dot. */
const breakable = (name) => name.split(".").flatMap((part, at) => (at ? [".", <wbr />, part] : [part]));

function Equation(props) {
  const { model, step, flat, node, reveal } = props;
  const source = model.nearestSource(flat, node);
  const { name, kind } = model.op(node);
  const why = node.live && node.le - node.ls === 1 && !hasInside(node) ? model.changed(step).whys?.[node.ls] : null;
  const cost = model.cost(node);
  const module = model.module(step, node);
  return (
    <section>
      <h2><span class={`op ${kind}`}>{node.label ? labelOf(model, flat, node) : breakable(name)}</span></h2>
      <pre class="full">{node.label ? <Label {...props} /> : <Text {...props} />}</pre>
      {why && <p class="why"><b class="changed">~ changed</b> {why}</p>}
      <dl>
        {node.outs.length > 0 && [<dt>type{node.outs.length > 1 ? "s" : ""}</dt>, <dd class="mono">{node.outs.slice(0, 40).map((value) => <div>{model.type(flat, value)}</div>)}</dd>]}
        {module && [<dt>module</dt>, <dd class="mono">{module}</dd>]}
        <dt>kind</dt><dd>{node.label ? "body" : kind}{hasInside(node) && node.le > node.ls ? `, ${node.le - node.ls} equations` : ""}</dd>
        {node.parent >= 0 && [<dt>inside</dt>, <dd><button class="link" onClick={() => reveal(step, flat.nodes[node.parent])}>{model.op(flat.nodes[node.parent]).name}</button></dd>]}
      </dl>
      <Loop {...props} />
      <Cost machine={model.run(step).machine} cost={cost} />
      <Claims {...props} />
      {source && <Source model={model} source={source} />}
    </section>
  );
}

function Loop(props) {
  const { model, flat, node } = props;
  const parts = loopParts(model, flat, node);
  if (!parts) return null;
  const carried = parts[1][1].length;
  const made = [["carry after", node.outs.slice(0, carried)], ["ys", node.outs.slice(carried)]];
  return (
    <div>
      <h3>The loop{parts.trips && `, ${parts.trips}`}</h3>
      <dl>
        {[...parts, ...made].filter(([, values]) => values.length).map(([name, values]) => [<dt>{name}</dt>, <dd class="mono"><Values {...props} values={values} limit={12} /></dd>])}
      </dl>
    </div>
  );
}

function Cost({ machine, cost }) {
  if (!cost.flops && !cost.bytes) return null;
  const intensity = cost.bytes ? cost.flops / cost.bytes : 0;
  const [name, flops, rate] = machine ?? [];
  const least = machine ? Math.max(cost.flops / flops, cost.bytes / rate) : 0;
  return (
    <div>
      <h3>Cost</h3>
      <dl>
        <dt>computes</dt><dd>{countText(cost.flops)} FLOP</dd>
        <dt>moves</dt><dd>{bytesText(cost.bytes)}</dd>
        {cost.sent > 0 && [<dt>sends</dt>, <dd>{bytesText(cost.sent)}</dd>]}
        <dt>intensity</dt><dd>{intensity.toFixed(1)} FLOP/B</dd>
        {machine && [<dt>at least</dt>, <dd>{timeText(least)} on {name}, bound by {intensity >= flops / rate ? "compute" : "memory"}</dd>]}
      </dl>
    </div>
  );
}

function Claims({ model, step, node }) {
  if (node.label) return null;
  const run = model.run(step);
  const claim = model.claim(node);
  const { name } = model.op(node);
  const owner = name.includes("::") ? name.split("::")[0] : null;
  if (!claim) {
    const who = owner ?? (hasInside(node) ? null : "torch");
    return <div><h3>Who runs it</h3><p>{who ? <b class="who">{who}</b> : "Nobody as it is: it is unfolded."}{who === "torch" && <span class="quiet"> No other executor was asked.</span>}</p><LeftOut run={run} /></div>;
  }
  const [taken, how, refusals, times] = claim;
  return (
    <div>
      <h3>Who runs it</h3>
      <p>{taken ? <b class="who">{taken}</b> : "Nobody as it is: it is unfolded."} {how}{times > 1 && <span class="quiet"> ({times} times)</span>}</p>
      {refusals.length > 0 && <ul class="refusals">{refusals.map(([who, why]) => <li><b>{who}</b> did not: {why}</li>)}</ul>}
      <LeftOut run={run} />
    </div>
  );
}

const LeftOut = ({ run }) =>
  run.leftOut.length > 0 && <ul class="refusals">{run.leftOut.map(([who, why]) => <li><b>{who}</b> was not asked: {why}</li>)}</ul>;

function Source({ model, source }) {
  const lines = model.data.lines[source.file] ?? {};
  const numbers = Object.keys(lines).map(Number).filter((line) => Math.abs(line - source.line) <= 3);
  const indent = Math.min(...numbers.filter((line) => lines[line].trim()).map((line) => lines[line].search(/\S/)), 60);
  return (
    <div>
      <h3>Your code</h3>
      <p class="quiet path"><a class="link" href={editorLink(model, source)} title="open in an editor">{source.path}:{source.line}</a> in {source.fn} <Copy text={`${source.path}:${source.line}`} /></p>
      <pre class="code" tabIndex={0} aria-label="your code">{numbers.map((line) => <div class={line === source.line ? "on" : ""}><i>{line}</i>{breakableCode(lines[line].slice(indent))}</div>)}</pre>
    </div>
  );
}

// Code that may break after punctuation: a long word behind an indentation does not leave its first line empty.
const breakableCode = (code) => code.split(/(?<=[.,([{=_])/).flatMap((part) => [part, <wbr />]);

const editorLink = ({ data }, { path, line }) => {
  const whole = /^(\/|\w:)/.test(path) ? path : `${data.folder}/${path}`;
  return data.editor.replaceAll("{path}", encodeURI(whole)).replaceAll("{line}", line);
};

function Copy({ text }) {
  const [done, setDone] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => setDone(true), () => {});
  return <button class="link" onClick={copy} title={`copy ${text}`}>{done ? "copied" : "copy"}</button>;
}

const MAX_USES = 6;

function Variable({ model, step, flat, value, followed, reveal, goTo, pickValue }) {
  const known = flat.values.get(value);
  const root = flat.roots.indexOf(value);
  return (
    <section class="variable">
      <h2><var class="on">{known.name}</var> <span class="mono">{model.type(flat, value)}</span><button class="close" aria-label="let go" onClick={() => pickValue(value)}>×</button></h2>
      {madeInside(known.name) && <p class="quiet">{madeInside(known.name)}</p>}
      {root >= 0 && argumentName(model, step, root) && <p class="quiet mono">{argumentName(model, step, root)}</p>}
      <h3>Through the steps</h3>
      <ol class="life">
        {model.data.steps.map((one, at) => <Life key={at} {...{ model, at, step, reveal, goTo }} name={one.name} value={followed[at]} />)}
      </ol>
    </section>
  );
}

function Life({ model, at, step, name, value, reveal, goTo }) {
  if (value === undefined) return <li class="none"><span class="stepname">{name}</span><span class="quiet">not there</span></li>;
  const flat = model.flat(at);
  const known = flat.values.get(value);
  const maker = flat.nodes[known.maker];
  const isOutput = flat.outputs.includes(value);
  const isResult = flat.outputs.slice(0, model.data.steps[at].results).includes(value);
  const last = known.uses.at(-1);
  const isProgram = model.data.steps[at].kind === "program";
  const link = (i) => <button class="link" onClick={() => reveal(at, flat.nodes[i])}>{model.op(flat.nodes[i]).name.replace(/^aten\.|\.default$/g, "")}<sub>{pathOf(flat, flat.nodes[i])}</sub></button>;
  const root = flat.roots.indexOf(value);
  return (
    <li class={at === step ? "on" : ""}>
      <button class="stepname" onClick={() => goTo(at)}>{name}</button> <var>{known.name}</var>
      <div>{maker ? ["made by ", link(maker.i)] : root >= flat.numInputs ? "closed over" : "an input"}</div>
      <div>{known.uses.length ? ["read by ", known.uses.slice(0, MAX_USES).map((i, k) => [k > 0 && ", ", link(i)]), known.uses.length > MAX_USES && ` and ${known.uses.length - MAX_USES} more`] : isOutput || known.isGiven ? null : "read by nothing"}</div>
      {known.isGiven && <div>returned by the body</div>}
      {model.isSaved(at, value) && <div class="saved">saved for the backward</div>}
      {isResult && <div>returned</div>}
      {isProgram && !isOutput && maker && last !== undefined && <div>freed after {link(last)}</div>}
    </li>
  );
}
