import { bytesText, countText } from "./data.js";
import { hasInside, pathOf } from "./rows.js";
import { useState } from "preact/hooks";
import { Text, Values, argumentName, loopParts, madeInside } from "./table.jsx";

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
  const { memory, steps, machine } = model.data;
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
      <h2>The programs</h2>
      <dl>
        <dt>peak</dt><dd>{bytesText(memory.peak)}{memory.unseen > 0 && <span class="quiet"> and what {memory.unseen > 1 ? `${memory.unseen} calls of executors allocate` : "1 call of an executor allocates"} inside, which nobody knows</span>}</dd>
        <dt>residuals</dt><dd>{bytesText(memory.residuals)}</dd>
        <dt>outputs</dt><dd>{bytesText(memory.outputs)}</dd>
        <dt>arguments</dt><dd>{bytesText(memory.inputs)}</dd>
        {machine && [<dt>machine</dt>, <dd>{machine[0]}</dd>]}
      </dl>
      <p class="quiet">Select an equation to see where it comes from and who runs it. Click a variable to follow it through all steps.</p>
    </section>
  );
}

function Equation(props) {
  const { model, step, flat, node, reveal } = props;
  const source = model.nearestSource(flat, node);
  const { name, kind } = model.op(node);
  const why = node.live && node.le - node.ls === 1 && !hasInside(node) ? model.data.steps[step].whys?.[node.ls] : null;
  const cost = model.cost(node);
  const module = model.module(step, node);
  return (
    <section>
      <h2><span class={`op ${kind}`}>{name}</span></h2>
      <pre class="full"><Text {...props} /></pre>
      {why && <p class="why"><b class="changed">~ changed</b> {why}</p>}
      <dl>
        {node.outs.length > 0 && [<dt>type{node.outs.length > 1 ? "s" : ""}</dt>, <dd class="mono">{node.outs.slice(0, 40).map((value) => <div>{model.type(flat, value)}</div>)}</dd>]}
        {module && [<dt>module</dt>, <dd class="mono">{module}</dd>]}
        <dt>kind</dt><dd>{kind}{hasInside(node) && node.le > node.ls ? `, ${node.le - node.ls} equations` : ""}</dd>
        {node.parent >= 0 && [<dt>inside</dt>, <dd><button class="link" onClick={() => reveal(step, flat.nodes[node.parent])}>{model.op(flat.nodes[node.parent]).name}</button></dd>]}
      </dl>
      <Loop {...props} />
      <Cost model={model} cost={cost} />
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

function Cost({ model, cost }) {
  const { machine } = model.data;
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
        {machine && [<dt>at least</dt>, <dd>{(least * 1e6).toFixed(1)} µs on {name}, bound by {intensity >= flops / rate ? "compute" : "memory"}</dd>]}
      </dl>
    </div>
  );
}

function Claims({ model, node }) {
  if (node.label) return null;
  const claim = model.claim(node);
  const { name } = model.op(node);
  const owner = name.includes("::") ? name.split("::")[0] : null;
  if (!claim) {
    const who = owner ?? (hasInside(node) ? null : "torch");
    return <div><h3>Who runs it</h3><p>{who ? <b class="who">{who}</b> : "Nobody as it is: it is unfolded."}{who === "torch" && <span class="quiet"> No other executor was asked.</span>}</p><LeftOut model={model} /></div>;
  }
  const [taken, how, refusals, times] = claim;
  return (
    <div>
      <h3>Who runs it</h3>
      <p>{taken ? <b class="who">{taken}</b> : "Nobody as it is: it is unfolded."} {how}{times > 1 && <span class="quiet"> ({times} times)</span>}</p>
      {refusals.length > 0 && <ul class="refusals">{refusals.map(([who, why]) => <li><b>{who}</b> did not: {why}</li>)}</ul>}
      <LeftOut model={model} />
    </div>
  );
}

const LeftOut = ({ model }) =>
  model.data.leftOut.length > 0 && <ul class="refusals">{model.data.leftOut.map(([who, why]) => <li><b>{who}</b> was not asked: {why}</li>)}</ul>;

function Source({ model, source }) {
  const lines = model.data.lines[source.file] ?? {};
  const numbers = Object.keys(lines).map(Number).filter((line) => Math.abs(line - source.line) <= 3);
  const indent = Math.min(...numbers.filter((line) => lines[line].trim()).map((line) => lines[line].search(/\S/)), 60);
  return (
    <div>
      <h3>Your code</h3>
      <p class="quiet path"><a class="link" href={editorLink(model, source)} title="open in an editor">{source.path}:{source.line}</a> in {source.fn} <Copy text={`${source.path}:${source.line}`} /></p>
      <pre class="code" tabIndex={0} aria-label="your code">{numbers.map((line) => <div class={line === source.line ? "on" : ""}><i>{line}</i>{lines[line].slice(indent)}</div>)}</pre>
    </div>
  );
}

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
      <div>{known.uses.length ? ["read by ", known.uses.slice(0, MAX_USES).map((i, k) => [k > 0 && ", ", link(i)]), known.uses.length > MAX_USES && ` and ${known.uses.length - MAX_USES} more`] : isOutput ? null : "read by nothing"}</div>
      {model.isSaved(at, value) && <div class="saved">saved for the backward</div>}
      {isResult && <div>returned</div>}
      {isProgram && !isOutput && maker && last !== undefined && <div>freed after {link(last)}</div>}
    </li>
  );
}
