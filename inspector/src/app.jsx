import { render } from "preact";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { Charts } from "./charts.jsx";
import { Model, load, msText } from "./data.js";
import { Details } from "./details.jsx";
import { Rows, ROW } from "./table.jsx";
import { groupAround, groupsOf, hasInside, keyOfRow, nodeAt, openAtFirst, pathOf, rowsOf, search, textRows } from "./rows.js";

const readHash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

const storedTheme = () => {
  try {
    return localStorage.getItem("inspector-theme");
  } catch {
    return null; // a frame of a notebook may have no storage
  }
};

function App({ model }) {
  const { data } = model;
  const initial = useMemo(readHash, []);
  const clamp = (text) => Math.min(Math.max(0, Number(text) || 0), data.steps.length - 1);
  const [step, setStep] = useState(() => clamp(initial.step ?? 0));
  const [opened, setOpened] = useState(() => new Map());
  const [selected, setSelected] = useState(null); // the index of a node, or the key of a group
  const [value, setValue] = useState(null);
  const [query, setQuery] = useState(initial.q ?? "");
  const [asked, setAsked] = useState(query);
  const [inputs, setInputs] = useState(() => data.runs[0].arguments.length <= 6);
  const [chart, setChart] = useState(initial.chart ?? "memory");
  const [theme, setTheme] = useState(() => storedTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  const [help, setHelp] = useState(false);
  const [asText, setAsText] = useState(false); // a program as the Python that runs
  const [target, setTarget] = useState(null); // a row to bring into view
  const box = useRef(null);
  const flat = model.flat(step);
  const open = useMemo(() => opened.get(step) ?? openAtFirst(flat), [opened, step, flat]);
  const node = flat.nodes[selected] ?? null;
  const group = typeof selected === "string" ? selected : null;

  const rows = useMemo(
    () => (asText && data.steps[step].text ? textRows(data.steps[step].text) : rowsOf(model, step, open, inputs)),
    [model, step, open, inputs, asText],
  );
  const hits = useMemo(() => search(model, step, asked), [model, step, asked]);
  const followed = useMemo(() => (value === null ? null : model.follow(step, value)), [model, step, value]);

  useEffect(() => {
    const timer = setTimeout(() => setAsked(query), 120);
    return () => clearTimeout(timer);
  }, [query]);
  document.documentElement.dataset.theme = theme; // before the charts read their colours
  useEffect(() => {
    try {
      localStorage.setItem("inspector-theme", theme);
    } catch {
      // as above
    }
  }, [theme]);
  useEffect(() => {
    const parts = new URLSearchParams({ step });
    if (node) parts.set("at", pathOf(flat, node));
    if (value !== null) parts.set("var", flat.values.get(value)?.name ?? "");
    if (asked) parts.set("q", asked);
    if (chart !== "memory") parts.set("chart", chart);
    try {
      history.replaceState(null, "", `#${parts}`);
    } catch {
      // a frame of a notebook has no address
    }
  }, [step, selected, value, asked, chart]);

  const openWith = (at, change) => setOpened((known) => new Map(known).set(at, change(known.get(at) ?? openAtFirst(model.flat(at)))));
  const toggle = useCallback((i) => {
    openWith(step, (was) => {
      const next = new Set(was);
      if (!next.delete(i)) next.add(i);
      return next;
    });
  }, [step]);

  // Show a node: its step, the nodes around it unfolded, and itself in view.
  const reveal = useCallback((at, one) => {
    const there = model.flat(at);
    openWith(at, (was) => {
      const next = new Set(was);
      for (let up = there.nodes[one.parent]; up; up = there.nodes[up.parent]) next.add(up.i);
      const around = groupAround(model, at, one);
      if (around) next.add(around);
      return next;
    });
    setAsText(false);
    setStep(at);
    setSelected(one.i);
    setTarget({ i: one.i });
  }, [model]);

  const goTo = useCallback((at) => {
    if (at < 0 || at >= data.steps.length || at === step) return;
    const there = value === null ? undefined : model.follow(step, value)[at];
    setValue(there ?? null);
    setSelected(null);
    setStep(at);
    const maker = there === undefined ? undefined : model.flat(at).nodes[model.flat(at).values.get(there)?.maker];
    if (maker) reveal(at, maker);
    else if (box.current) box.current.scrollTop = 0;
  }, [step, value, model]);

  useEffect(() => {
    const apply = (wanted) => {
      const at = clamp(wanted.step ?? 0);
      const there = model.flat(at);
      const found = wanted.at && nodeAt(there, wanted.at);
      if (found) reveal(at, found);
      else setStep(at);
      const named = wanted.var && [...there.values.values()].find((one) => one.name === wanted.var);
      setValue(named ? named.id : null);
      if (wanted.q !== undefined) setQuery(wanted.q);
    };
    if (initial.at || initial.var) apply(initial);
    const changed = () => apply(readHash());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, [model]);

  useLayoutEffect(() => {
    if (!target || !box.current) return;
    const at = rows.findIndex((row) => keyOfRow(row) === target.i);
    if (at < 0) return;
    const { scrollTop, clientHeight } = box.current;
    const top = at * ROW;
    if (top < scrollTop + ROW || top > scrollTop + clientHeight - 3 * ROW) box.current.scrollTop = Math.max(0, top - clientHeight / 3);
    setTarget(null);
  }, [target, rows]);

  const move = (to) => {
    const places = rows.flatMap((row, at) => (keyOfRow(row) === null ? [] : [at]));
    const here = places.findIndex((at) => keyOfRow(rows[at]) === selected);
    const last = places.length - 1;
    const next = rows[places[Math.min(Math.max(0, to(here, last)), last)]];
    if (next) {
      setSelected(keyOfRow(next));
      setTarget({ i: keyOfRow(next) });
    }
  };
  const nextHit = (by) => {
    if (!hits.length) return;
    const after = by > 0 ? hits.find((i) => i > (selected ?? -1)) : hits.findLast((i) => i < (selected ?? Infinity));
    reveal(step, flat.nodes[after ?? (by > 0 ? hits[0] : hits.at(-1))]);
  };
  const nextChange = (by) => {
    const { status } = model.changed(step);
    if (!status) return;
    const here = node ? (by > 0 ? node.ls : node.ls - 1) : by > 0 ? -1 : status.length;
    const from = node && by > 0 && node.le - node.ls === 1 ? here + 1 : Math.max(here, by > 0 ? 0 : here);
    for (let leaf = from; leaf >= 0 && leaf < status.length; leaf += by) {
      if (status[leaf] !== "s") return reveal(step, flat.nodes[flat.leaves[leaf]]);
    }
  };
  // The variables of the selected row, one after the other: its results, then what it reads.
  const nextValue = () => {
    if (!node) return;
    const all = [...new Set([...node.outs, ...node.operands].filter((one) => flat.values.has(one)))];
    if (all.length) setValue(all[(all.indexOf(value) + 1) % all.length]);
  };
  const toPeak = () => {
    const found = model.atPosition(step, model.memory(step).peakAt);
    if (found) reveal(found.step, found.node);
  };
  const unfoldAll = (all) => openWith(step, () => new Set(all ? [...flat.nodes.filter((one) => hasInside(one)).map((one) => one.i), ...[...groupsOf(model, step).keys()].map((first) => `m${first}`)] : []));
  const foldAround = () => {
    const around = groupAround(model, step, node);
    if (!around || !open.has(around)) return;
    toggle(around);
    setSelected(around);
    setTarget({ i: around });
  };

  const act = {
    j: () => move((here) => here + 1), k: () => move((here, last) => (here < 0 ? last : here - 1)),
    Home: () => move(() => 0), End: () => move((_, last) => last),
    "]": () => goTo(step + 1), "[": () => goTo(step - 1),
    n: () => nextChange(1), p: () => nextChange(-1),
    e: () => unfoldAll(true), c: () => unfoldAll(false), i: () => setInputs((was) => !was),
    m: () => setChart((was) => (was === "memory" ? "roofline" : was === "roofline" ? "none" : "memory")),
    s: () => setAsText((was) => !was),
    t: () => setTheme((was) => (was === "dark" ? "light" : "dark")),
    "?": () => setHelp((was) => !was),
    "/": () => document.getElementById("search").focus(),
    Escape: () => (help ? setHelp(false) : value !== null ? setValue(null) : setSelected(null)),
    v: () => nextValue(), g: () => toPeak(),
    Enter: () => (group ? toggle(group) : node && hasInside(node) && toggle(node.i)),
    ArrowRight: () => (group ? !open.has(group) && toggle(group) : node && hasInside(node) && !open.has(node.i) && toggle(node.i)),
    ArrowLeft: () => {
      if (group) return open.has(group) && toggle(group);
      if (!node) return;
      if (open.has(node.i)) toggle(node.i);
      else if (flat.nodes[node.parent]) reveal(step, flat.nodes[node.parent]);
      else foldAround();
    },
  };
  [act.ArrowDown, act.ArrowUp] = [act.j, act.k];
  act.l = act.ArrowRight;
  act.h = act.ArrowLeft;
  const press = useRef(null);
  press.current = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input")) {
      if (event.key === "Escape") event.target.blur();
      if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
      return;
    }
    if (event.target.closest?.("#report")) return; // it folds and scrolls by its own keys
    if (event.target.closest?.("button") && event.key === "Enter") return;
    const found = act[event.key];
    if (found) {
      event.preventDefault();
      found();
    }
  };
  useEffect(() => {
    const listen = (event) => press.current(event);
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);

  const pick = useCallback((i) => setSelected(i), []);
  const pickValue = useCallback((one) => setValue((was) => (was === one ? null : one)), []);

  const took = data.steps.reduce((sum, one) => sum + one.ms, 0); // a plan's step took no time
  return (
    <div class="page">
      <header>
        <h1>{[...new Set(data.runs.map((run) => run.name))].join(" beside ")}</h1>
        <span class="quiet figures">{[counted(data.steps.length, "step"), took > 0 && msText(took), counted(flat.leaves.length, "equation")].filter(Boolean).join(" · ")}</span>
        <div class="grow" />
        <label class="search">
          <input id="search" type="search" placeholder="Search op, module, type, line…   /" value={query} onInput={(event) => setQuery(event.target.value)} aria-label="search" />
          {asked && <span class="count" data-testid="hits">{hits.length}</span>}
        </label>
        <button onClick={() => setChart(chart === "none" ? "memory" : "none")} title="show or hide the charts (m)">{chart === "none" ? "Charts" : "Hide charts"}</button>
        <button onClick={act.t} title="light or dark (t)" aria-label="theme">{theme === "dark" ? "☀" : "☾"}</button>
        <button onClick={act["?"]} title="keys (?)" aria-label="help">?</button>
      </header>
      <Steps model={model} step={step} followed={followed} goTo={goTo} />
      <main>
        {chart !== "none" && <Charts model={model} step={step} node={node} chart={chart} setChart={setChart} reveal={reveal} theme={theme} />}
        <Rows {...{ model, step, flat, rows, open, selected, value, hits, box, toggle, pick, pickValue, inputs, setInputs, asText, setAsText }} />
      </main>
      <Details {...{ model, step, flat, node, value, followed, reveal, goTo, pickValue }} />
      {help && <Help close={() => setHelp(false)} />}
    </div>
  );
}

function Steps({ model, step, followed, goTo }) {
  const { runs, steps } = model.data;
  const most = Math.max(...steps.map((one) => one.ms), 1e-9);
  return (
    <nav aria-label="steps" tabIndex={0}>
      {runs.length === 1 && <h2>Steps</h2>}
      <ol>
        {steps.map((one, at) => (
          <li key={at}>
            {runs.length > 1 && steps[at - 1]?.run !== one.run && <h2>{one.run + 1}. {runs[one.run].name}</h2>}
            <button class={`step ${at === step ? "on" : ""} ${followed && followed[at] === undefined ? "without" : ""}`} onClick={() => goTo(at)} aria-current={at === step}>
              <span class="name"><i class={`dot ${one.kind}`} />{one.name.split(/(?<=_)/).flatMap((part) => [part, <wbr />])}</span>
              {one.ms > 0 && <span class="ms">{msText(one.ms)}</span>}
              {one.ms > 0 && <span class="bar"><i style={{ width: `${(100 * one.ms) / most}%` }} /></span>}
              <StepCounts counts={model.changed(at).counts} />
            </button>
          </li>
        ))}
      </ol>
      {steps.length > 1 && <p class="legend"><span><b class="added">+</b> added</span> <span><b class="removed">−</b> removed</span> <span><b class="changed">~</b> changed</span> against the step before{runs.length > 1 && "; in the second run, against the first"}</p>}
    </nav>
  );
}

const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

function StepCounts({ counts }) {
  if (!counts) return null;
  return (
    <span class="counts">
      {counts.added > 0 && <b class="added">+{counts.added}</b>}
      {counts.removed > 0 && <b class="removed">−{counts.removed}</b>}
      {counts.changed > 0 && <b class="changed">~{counts.changed}</b>}
      {counts.added + counts.removed + counts.changed === 0 && <span>no change</span>}
    </span>
  );
}

const KEYS = [
  ["j k ↓ ↑", "next, previous row"], ["Home End", "first, last row"], ["→ ← Enter", "unfold, fold"], ["[ ]", "previous, next step"],
  ["n p", "next, previous change"], ["v", "follow a variable of the row, then the next"], ["g", "the equation at the step's peak of memory"], ["/", "search; Enter goes from hit to hit"], ["e c", "unfold all, fold all"],
  ["i", "inputs"], ["s", "a program as the Python that runs"], ["m", "memory, roofline, neither"], ["t", "light, dark"], ["Esc", "let go of variable and row"],
];

function Help({ close }) {
  return (
    <div class="veil" onClick={close}>
      <div class="help" role="dialog" aria-label="keys">
        <h2>Keys</h2>
        <dl>{KEYS.map(([keys, what]) => [<dt>{keys.split(" ").map((key) => <kbd>{key}</kbd>)}</dt>, <dd>{what}</dd>])}</dl>
        <p class="quiet">Click a variable to follow it through all steps. The address of the page says where you are: copy it to share what you see.</p>
      </div>
    </div>
  );
}

const root = document.getElementById("app");
load(document.getElementById("data").textContent).then((data) => {
  root.textContent = "";
  const model = (globalThis.inspector = new Model(data)); // for scripts and for tests
  render(<App model={model} />, root);
});
