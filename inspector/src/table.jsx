import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { bytesText, countText } from "./data.js";
import { hasInside } from "./rows.js";

export const ROW = 24;
const OVERSCAN = 12;
const PRINTED = 4000;

// The rows that are in view, of any number. When the page is printed, all of them.
export function Rows(props) {
  const { rows, box, hits } = props;
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const [printing, setPrinting] = useState(false);
  useLayoutEffect(() => {
    const element = box.current;
    const measure = () => setHeight(element.clientHeight);
    const watch = new ResizeObserver(measure);
    watch.observe(element);
    measure();
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    const query = matchMedia("print");
    const change = () => setPrinting(query.matches);
    const [before, after] = [() => setPrinting(true), () => setPrinting(false)];
    query.addEventListener("change", change);
    addEventListener("beforeprint", before);
    addEventListener("afterprint", after);
    return () => {
      query.removeEventListener("change", change);
      removeEventListener("beforeprint", before);
      removeEventListener("afterprint", after);
    };
  }, []);
  const first = printing ? 0 : Math.max(0, Math.floor(top / ROW) - OVERSCAN);
  const last = printing ? Math.min(rows.length, PRINTED) : Math.min(rows.length, Math.ceil((top + height) / ROW) + OVERSCAN);
  const found = new Set(hits);
  const isProgram = Boolean(props.model.data.steps[props.step].text);
  return (
    <section class="table" aria-label="equations">
      <div class="row head">
        <span class="mark" /><span class="eq">{props.asText && isProgram ? "Python" : "equation"}{isProgram && <button class="tag" onClick={() => props.setAsText((was) => !was)} title="the Python that runs (s)">{props.asText ? "equations" : "Python"}</button>}</span>
        {!(props.asText && isProgram) && [<span class="type">type</span>, <span class="num">FLOP</span>, <span class="num">bytes</span>, <span class="line">your line</span>]}
      </div>
      <div class="rows" ref={box} onScroll={(event) => setTop(event.currentTarget.scrollTop)} tabIndex={-1}>
        <div class="all" style={{ height: `${rows.length * ROW}px` }}>
          <div class="window" style={{ transform: `translateY(${first * ROW}px)` }}>
            {rows.slice(first, last).map((row, k) => <Row key={keyOf(row, first + k)} row={row} found={found} {...props} />)}
          </div>
        </div>
      </div>
    </section>
  );
}

const keyOf = (row, at) => (row.kind === "node" ? row.i : row.kind === "ghost" ? `g${row.leaf}` : row.kind === "root" || row.kind === "text" ? `r${row.at}` : row.kind + (at === 0));

function Row(props) {
  const { row, flat } = props;
  if (row.kind === "inputs") return <Inputs {...props} />;
  if (row.kind === "root") return <Root {...props} />;
  if (row.kind === "ghost") return <Ghost {...props} />;
  if (row.kind === "text") return <Python row={row} />;
  if (row.kind === "return") {
    return (
      <div class="row return">
        <span class="mark" /><span class="eq"><em>return</em> <Values {...props} values={flat.outputs} limit={12} /></span>
      </div>
    );
  }
  return <Equation {...props} node={flat.nodes[row.i]} />;
}

function Python({ row }) {
  const at = row.line.indexOf("# ");
  const [code, note] = at < 0 ? [row.line, ""] : [row.line.slice(0, at), row.line.slice(at)];
  return <div class="row python"><span class="mark">{row.at + 1}</span><span class="code-line">{code}<span class="quiet">{note}</span></span></div>;
}

function Inputs({ flat, inputs, setInputs }) {
  const count = flat.roots.length;
  const constants = count - flat.numInputs;
  return (
    <div class="row inputs" onClick={() => setInputs((was) => !was)}>
      <span class="mark" />
      <span class="eq">
        <button class="fold" aria-label="inputs" aria-expanded={inputs}>{inputs ? "▾" : "▸"}</button>
        <em>def</em> {flat.name}<span class="quiet"> · {flat.numInputs} input{flat.numInputs === 1 ? "" : "s"}{constants > 0 ? `, ${constants} closed over` : ""}</span>
      </span>
    </div>
  );
}

function Root(props) {
  const { row, model, flat, step } = props;
  const { data } = model;
  const name = row.at < flat.numInputs ? argumentName(model, step, row.at) : "closed over";
  return (
    <div class="row root">
      <span class="mark" />
      <span class="eq" style={{ paddingLeft: "30px" }}><Values {...props} values={[row.value]} /><span class="quiet"> {name}</span></span>
      <span class="type">{data.types[flat.values.get(row.value).type][0]}</span>
      <span class="num" /><span class="num">{bytesText(model.bytes(flat, row.value))}</span><span class="line" />
    </div>
  );
}

// Only steps over the whole function have its arguments in order; those of an inner one have as many by chance.
export const argumentName = (model, step, at) => {
  const { data } = model;
  const kind = data.steps[step].name;
  return kind.startsWith("backward") ? "" : (data.arguments[at] ?? "");
};

function Ghost({ row, model, step }) {
  const before = model.data.steps[step].before;
  const flat = model.flat(before);
  const node = flat.nodes[flat.leaves[row.leaf]];
  const source = model.nearestSource(flat, node);
  return (
    <div class="row ghost" title="removed by this step">
      <span class="mark">−</span>
      <span class="eq" style={{ paddingLeft: `${30 + 16 * row.depth}px` }}><s><Text model={model} flat={flat} node={node} /></s></span>
      <span class="type">{node.outs.map((value) => model.type(flat, value)).join(", ")}</span>
      <span class="num" /><span class="num" />
      <span class="line">{source && <Line source={source} />}</span>
    </div>
  );
}

const MARKS = { a: ["added", "+"], c: ["changed", "~"], s: ["", ""] };

const Equation = memo(function Equation(props) {
  const { model, step, flat, node, open, selected, found, toggle, pick } = props;
  const { status, inPlace } = model.data.steps[step];
  const isOpen = open.has(node.i);
  const single = node.live && !node.label && !hasInside(node) && node.le - node.ls === 1;
  const [name, sign] = status && node.live && node.le - node.ls === 1 && single ? MARKS[status[node.ls]] : ["", ""];
  const counts = status && hasInside(node) && node.live ? model.changesIn(step, node) : null;
  const all = counts && node.le > node.ls && counts[0] === node.le - node.ls;
  const source = model.source(node);
  const cost = model.cost(node);
  const module = model.module(step, node);
  const above = flat.nodes[node.parent] ? model.module(step, flat.nodes[node.parent]) : "";
  const beside = above || previousModule(model, step, flat, node); // where calls are unfolded, a module is named where it begins
  const hidden = hasInside(node) && !isOpen ? countIn(found, node) : 0;
  const runsInPlace = inPlace && node.depth === 0 && inPlace.includes(node.position);
  const mark = all ? "added" : name || (counts && counts.some(Boolean) ? "mixed" : "");
  return (
    <div class={`row node ${mark} ${selected === node.i ? "selected" : ""} ${found.has(node.i) ? "hit" : ""}`} data-node={node.i} onClick={() => pick(node.i)} onDblClick={() => hasInside(node) && toggle(node.i)}>
      <span class="mark">{all ? "+" : sign}</span>
      <span class="eq" style={{ paddingLeft: `${10 + 16 * node.depth}px` }}>
        {hasInside(node) ? (
          <button class="fold" aria-label={isOpen ? "fold" : "unfold"} aria-expanded={isOpen} onClick={(event) => { event.stopPropagation(); toggle(node.i); }}>{isOpen ? "▾" : "▸"}</button>
        ) : <span class="fold" />}
        {node.label ? <Label {...props} /> : <Text {...props} brief={hasInside(node)} />}
        {module && module !== beside && (hasInside(node) || node.parent < 0) && <span class="module">{module}</span>}
        {runsInPlace && <span class="tag" title="computed in its first operand's memory">in place</span>}
        {!isOpen && !all && counts && <Counts counts={counts} />}
        {hidden > 0 && <span class="tag hits">{hidden} hit{hidden > 1 ? "s" : ""}</span>}
      </span>
      <span class="type" title={node.outs.map((value) => model.type(flat, value)).join("\n")}>{node.outs.slice(0, 3).map((value) => model.type(flat, value)).join(", ")}{node.outs.length > 3 ? ` +${node.outs.length - 3}` : ""}</span>
      <span class="num">{cost.flops ? countText(cost.flops) : ""}</span>
      <span class="num">{cost.bytes ? bytesText(cost.bytes) : ""}</span>
      <span class="line">{source && !node.label && <Line source={source} />}</span>
    </div>
  );
});

const previousModule = (model, step, flat, node) => {
  const before = node.parent < 0 && !hasInside(node) ? flat.nodes[node.i - 1] : null;
  return before && before.depth === 0 ? model.module(step, before) : "";
};

const countIn = (found, node) => {
  if (!found.size) return 0;
  let count = 0;
  for (let i = node.i + 1; i < node.end; i++) if (found.has(i)) count++;
  return count;
};

const Counts = ({ counts: [added, changed, removed] }) => (
  <span class="counts">
    {added > 0 && <b class="added">+{added}</b>}{removed > 0 && <b class="removed">−{removed}</b>}{changed > 0 && <b class="changed">~{changed}</b>}
  </span>
);

const Line = ({ source }) => (
  <span title={`${source.path}:${source.line} in ${source.fn}`}><i>{source.path.split("/").pop()}:{source.line}</i> {source.text}</span>
);

function Label(props) {
  const { node } = props;
  return <span><em>{node.label}</em>(<Values {...props} values={node.inputs} limit={6} />)</span>;
}

// `aten.add.Tensor` reads as add, with what everybody knows of it in grey.
const Op = ({ name, kind }) => {
  const short = name.replace(/^torch\.nn\.functional\./, "F.").replace(/^aten\./, "").replace(/\.default$/, "");
  const [, base, overload] = kind === "leaf" ? short.match(/^(.*?)(\.\w+)?$/) : [null, short, ""];
  return <span class={`op ${kind}`} title={name}>{base}<span class="quiet">{overload}</span></span>;
};

export function Text(props) {
  const { model, node, brief } = props; // in brief, so that there is room for the module
  const { name, kind } = model.op(node);
  return (
    <span class="text">
      {node.outs.length > 0 && [<Values {...props} values={node.outs} limit={brief ? 1 : 3} />, " = "]}
      <Op name={name} kind={kind} />(<Values {...props} values={node.args} limit={brief ? 3 : 8} />
      {node.kwargs?.map(([key, arg], k) => [k || node.args.length ? ", " : "", <span class="key">{key}=</span>, <Arg {...props} arg={arg} />])})
    </span>
  );
}

export function Values(props) {
  const { values, limit = 1e9 } = props;
  const shown = values.length > limit + 1 ? values.slice(0, limit) : values;
  return [
    shown.map((arg, k) => [k > 0 && ", ", <Arg {...props} arg={arg} />]),
    shown.length < values.length && <span class="quiet">, +{values.length - shown.length}</span>,
  ];
}

function Arg(props) {
  const { arg, flat, value, pickValue } = props;
  if (Array.isArray(arg)) return <span>(<Values {...props} values={arg} limit={8} />)</span>;
  const known = typeof arg === "number" ? flat.values.get(arg) : null;
  if (!known) return <span class="literal">{String(arg).replace(/^torch\./, "")}</span>;
  const click = pickValue && ((event) => { event.stopPropagation(); pickValue(arg); });
  return <var class={value === arg ? "on" : ""} onClick={click}>{known.name}</var>;
}
