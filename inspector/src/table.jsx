import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { bytesText, countText } from "./data.js";
import { hasInside, keyOfRow } from "./rows.js";

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
    <div class="table" role={props.asText && isProgram ? "table" : "treegrid"} aria-label={`equations of ${props.model.data.steps[props.step].name}`} aria-rowcount={rows.length + 1} style={{ "--rows": rows.length }} tabIndex={0} aria-activedescendant={props.selected === null ? undefined : `row${props.selected}`}>
      <div class="row head" role="row" aria-rowindex={1}>
        <Cell class="mark" head><span class="unseen">change</span></Cell><span class="eq" role="columnheader">{props.asText && isProgram ? "Python" : "equation"}{isProgram && <button class="tag" onClick={() => props.setAsText((was) => !was)} title="the Python that runs (s)">{props.asText ? "equations" : "Python"}</button>}</span>
        {!(props.asText && isProgram) && [<Cell class="type" head>type</Cell>, <Cell class="num" head>FLOP</Cell>, <Cell class="num" head>bytes</Cell>, <Cell class="line" head>your line</Cell>]}
      </div>
      <div class="rows" role="rowgroup" ref={box} onScroll={(event) => setTop(event.currentTarget.scrollTop)} tabIndex={-1}>
        <div class="all" role="presentation" style={{ height: `${rows.length * ROW}px` }}>
          <div class="window" role="presentation" style={{ transform: `translateY(${first * ROW}px)` }}>
            {rows.slice(first, last).map((row, k) => <Row key={keyOf(row, first + k)} row={row} place={first + k + 2} found={found} {...props} />)}
          </div>
        </div>
      </div>
    </div>
  );
}

// One cell of the grid; `head` makes it a column's name.
const Cell = ({ head, children, ...rest }) => <span role={head ? "columnheader" : "gridcell"} {...rest}>{children}</span>;

const keyOf = (row, at) => (row.kind === "node" || row.kind === "group" ? keyOfRow(row) : row.kind === "ghost" ? `g${row.leaf}` : row.kind === "root" || row.kind === "text" ? `r${row.at}` : row.kind + (at === 0));

function Row(props) {
  const { row, flat, place } = props;
  if (row.kind === "inputs") return <Inputs {...props} />;
  if (row.kind === "root") return <Root {...props} />;
  if (row.kind === "ghost") return <Ghost {...props} />;
  if (row.kind === "group") return <Group {...props} />;
  if (row.kind === "text") return <Python row={row} place={place} />;
  if (row.kind === "return") {
    return (
      <div class="row return" role="row" aria-rowindex={place} aria-level={1}>
        <Cell class="mark" /><Cell class="eq"><em>return</em> <Values {...props} values={flat.outputs} limit={12} /></Cell>
      </div>
    );
  }
  return <Equation {...props} node={flat.nodes[row.i]} indent={row.inGroup ? 1 : 0} />;
}

function Python({ row, place }) {
  const at = row.line.indexOf("# ");
  const [code, note] = at < 0 ? [row.line, ""] : [row.line.slice(0, at), row.line.slice(at)];
  return <div class="row python" role="row" aria-rowindex={place}><span class="mark" role="cell">{row.at + 1}</span><span class="code-line" role="cell">{code}<span class="quiet">{note}</span></span></div>;
}

function Inputs({ flat, place, inputs, setInputs }) {
  const count = flat.roots.length;
  const constants = count - flat.numInputs;
  return (
    <div class="row inputs" role="row" aria-rowindex={place} aria-level={1} aria-expanded={inputs} onClick={() => setInputs((was) => !was)}>
      <Cell class="mark" />
      <Cell class="eq">
        <button class="fold" aria-label="inputs" aria-expanded={inputs}>{inputs ? "▾" : "▸"}</button>
        <em>def</em> {flat.name}<span class="quiet"> · {flat.numInputs} input{flat.numInputs === 1 ? "" : "s"}{constants > 0 ? `, ${constants} closed over` : ""}</span>
      </Cell>
    </div>
  );
}

function Root(props) {
  const { row, model, flat, step, place } = props;
  const { data } = model;
  const name = row.at < flat.numInputs ? argumentName(model, step, row.at) : "closed over";
  return (
    <div class="row root" role="row" aria-rowindex={place} aria-level={2}>
      <Cell class="mark" />
      <Cell class="eq" style={{ paddingLeft: "30px" }}><Values {...props} values={[row.value]} /><span class="quiet"> {name}</span></Cell>
      <Cell class="type">{data.types[flat.values.get(row.value).type][0]}</Cell>
      <Cell class="num" /><Cell class="num">{bytesText(model.bytes(flat, row.value))}</Cell><Cell class="line" />
    </div>
  );
}

// Only steps over the whole function have its arguments in order; those of an inner one have as many by chance.
export const argumentName = (model, step, at) => {
  const kind = model.data.steps[step].name;
  return kind.startsWith("backward") ? "" : (model.run(step).arguments[at] ?? "");
};

// The equations of a program that belong to one module, folded.
function Group({ row, model, step, open, place, selected, found, toggle, pick }) {
  const { group } = row;
  const key = keyOfRow(row);
  const isOpen = open.has(key);
  const { status } = model.changed(step);
  const nodes = model.flat(step).nodes.slice(row.i, group.end).filter((node) => node.depth === 0);
  const sum = (part) => nodes.reduce((total, node) => total + model.cost(node)[part], 0);
  const hidden = isOpen ? 0 : countIn(found, { i: row.i - 1, end: group.end });
  return (
    <div role="row" id={`row${key}`} aria-rowindex={place} aria-level={1} aria-expanded={isOpen} aria-selected={selected === key} class={`row group ${selected === key ? "selected" : ""}`} onClick={() => pick(key)} onDblClick={() => toggle(key)}>
      <Cell class="mark" />
      <Cell class="eq" style={{ paddingLeft: "10px" }}>
        <button class="fold" tabIndex={-1} aria-label={isOpen ? "fold" : "unfold"} aria-expanded={isOpen} onClick={(event) => { event.stopPropagation(); toggle(key); }}>{isOpen ? "▾" : "▸"}</button>
        <span class="op composite">{group.module}</span> <span class="quiet">{group.count} equations</span>
        {!isOpen && status && <Counts counts={model.changesIn(step, group)} />}
        {hidden > 0 && <span class="tag hits">{hidden} hit{hidden > 1 ? "s" : ""}</span>}
      </Cell>
      <Cell class="type" />
      <Cell class="num">{sum("flops") ? countText(sum("flops")) : ""}</Cell>
      <Cell class="num">{sum("bytes") ? bytesText(sum("bytes")) : ""}</Cell>
      <Cell class="line" />
    </div>
  );
}

function Ghost({ row, model, step, place }) {
  const { before } = model.changed(step);
  const flat = model.flat(before);
  const node = flat.nodes[flat.leaves[row.leaf]];
  const source = model.nearestSource(flat, node);
  return (
    <div class="row ghost" role="row" aria-rowindex={place} aria-level={row.depth + 1} title="removed by this step">
      <Cell class="mark">−</Cell>
      <Cell class="eq" style={{ paddingLeft: `${30 + 16 * row.depth}px` }}><s><Text model={model} flat={flat} node={node} /></s></Cell>
      <Cell class="type">{node.outs.map((value) => model.type(flat, value)).join(", ")}</Cell>
      <Cell class="num" /><Cell class="num" />
      <Cell class="line">{source && <Line source={source} />}</Cell>
    </div>
  );
}

const MARKS = { a: ["added", "+"], c: ["changed", "~"], s: ["", ""] };

const Equation = memo(function Equation(props) {
  const { model, step, flat, node, open, selected, found, toggle, pick, place, indent } = props;
  const [{ status }, { inPlace }] = [model.changed(step), model.data.steps[step]];
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
    <div role="row" id={`row${node.i}`} aria-rowindex={place} aria-level={node.depth + indent + 1} aria-expanded={hasInside(node) ? isOpen : undefined} aria-selected={selected === node.i} class={`row node ${mark} ${selected === node.i ? "selected" : ""} ${found.has(node.i) ? "hit" : ""}`} data-node={node.i} onClick={() => pick(node.i)} onDblClick={() => hasInside(node) && toggle(node.i)}>
      <Cell class="mark">{all ? "+" : sign}</Cell>
      <Cell class="eq" style={{ paddingLeft: `${10 + 16 * (node.depth + indent)}px` }}>
        {hasInside(node) ? (
          <button class="fold" aria-label={isOpen ? "fold" : "unfold"} aria-expanded={isOpen} tabIndex={-1} onClick={(event) => { event.stopPropagation(); toggle(node.i); }}>{isOpen ? "▾" : "▸"}</button>
        ) : <span class="fold" />}
        {node.label ? <Label {...props} /> : <Text {...props} brief={hasInside(node)} />}
        {module && module !== beside && (hasInside(node) || node.parent < 0) && <span class="module">{module}</span>}
        {runsInPlace && <span class="tag" title="computed in its first operand's memory">in place</span>}
        {!isOpen && !all && counts && <Counts counts={counts} />}
        {hidden > 0 && <span class="tag hits">{hidden} hit{hidden > 1 ? "s" : ""}</span>}
      </Cell>
      <Cell class="type" title={node.outs.map((value) => model.type(flat, value)).join("\n")}>{node.outs.slice(0, 3).map((value) => model.type(flat, value)).join(", ")}{node.outs.length > 3 ? ` +${node.outs.length - 3}` : ""}</Cell>
      <Cell class="num">{cost.flops ? countText(cost.flops) : ""}</Cell>
      <Cell class="num">{cost.bytes ? bytesText(cost.bytes) : ""}</Cell>
      <Cell class="line">{source && !node.label && <Line source={source} />}</Cell>
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

// What a body is for: the condition or the step of a loop.
export const labelOf = (model, flat, node) => (loopParts(model, flat, flat.nodes[node.parent])?.conditioned ? ["condition", "step"][node.position] : node.label);

export function Label(props) {
  const { node, model, flat } = props;
  const parts = loopParts(model, flat, flat.nodes[node.parent], node.inputs);
  const label = labelOf(model, flat, node);
  if (!parts) return <span><em>{label}</em>(<Values {...props} values={node.inputs} limit={6} />)</span>;
  return (
    <span>
      <em>{label}</em>({parts.filter(([, values]) => values.length).map(([name, values], k) => [k > 0 && "; ", <span class="key">{name} </span>, <Values {...props} values={values} limit={4} />])}) {!parts.conditioned && <span class="quiet">{parts.trips}</span>}
    </span>
  );
}

const option = (node, name) => node.kwargs?.find(([key]) => key === name)?.[1];

// The operands of a loop by their parts, in the order in which it takes them; null for what is no loop.
export function loopParts(model, flat, node, values = node.args) {
  const name = node?.eq && model.op(node).name;
  const consts = Number(option(node ?? {}, "num_consts") ?? 0);
  if (name === "while_loop") {
    const [parts, most] = [[["consts", values.slice(0, consts)], ["carry", values.slice(consts)]], option(node, "max_steps")];
    parts.conditioned = true;
    parts.trips = most === undefined || most === "None" ? "as long as its condition holds" : `at most ${most} trips`;
    return parts;
  }
  if (name !== "scan") return null;
  const carry = Number(option(node, "num_carry") ?? 0);
  const parts = [["consts", values.slice(0, consts)], ["carry", values.slice(consts, consts + carry)], ["xs", values.slice(consts + carry)]];
  const length = option(node, "length") ?? model.type(flat, node.args[consts + carry]).match(/\[(\w+)/)?.[1];
  parts.trips = length === undefined ? "" : `${length} trip${length === "1" ? "" : "s"}`;
  return parts;
}

// `v3.74.9` is the ninth value that is made inside of what makes `v3.74`; `v3:0.x1` is an argument of a body.
export function madeInside(name) {
  const body = name.match(/^(.*):(\d+)\.x(\d+)$/);
  if (body) return `argument ${body[3]} of body ${body[2]} of the loop or choice that makes ${body[1]}`;
  const inner = name.match(/^(.*)\.(\d+)$/);
  return inner ? `value ${inner[2]} of those made inside of the call that makes ${inner[1].replace(/:(\d+)$/, ", body $1")}` : "";
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
  return <var class={value === arg ? "on" : ""} onClick={click} title={madeInside(known.name)}>{known.name}</var>;
}
