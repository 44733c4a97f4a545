"""A report is one page that needs no network, shows what it was given, escapes it, and filters its layouts."""

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from optimum_trn.report import Compilation, Curve, Memory, Report, Slice, Span, Table, chrome_trace, render

GIB = 2**30
REPORT = Report(
    title="llama <on> 16 nodes",
    status="Predicted by a cost model; nothing on this page was measured.",
    facts={"step": "1.5 s"},
    memory=Memory("core", [0.0, 1.0, 2.0], {"weights": [GIB] * 3, "activations": [0, 3 * GIB, GIB]}, 16 * GIB),
    step={"compute": 1.0, "optimizer": 0.5, "data loading": 0.0},
    pipeline=[[Span(0.0, 1.0, "forward", "micro-batch 0")], [Span(1.0, 3.0, "backward", "micro-batch 0")]],
    compilations=[Compilation(63, "abc", 120.0, False, "input_ids (4, 512) became (3, 512)")],
    layouts=Table(("layout", "step, s"), [("tp=8 zero-1", "1.0"), ("tp=4 mics=4", "2.0")], 1),
    scaling=Curve("nodes", [1, 2, 4], {"tokens/s of a node": [10.0, 9.0, 8.0]}, "tokens/s"),
    arguments="NeuronTrainingArguments(bf16=True)",
)
VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """The elements of a page, which must be closed in the order in which they were opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag, **attributes):
        return sum(tag == name and attributes.items() <= found.items() for name, found in self.elements)


def test_a_page_has_every_part_and_is_well_formed():
    page = Page(render(REPORT))
    sections = [found["id"] for tag, found in page.elements if tag == "section"]
    assert sections == ["summary", "hbm", "step", "pipeline", "compilations", "layouts", "scaling", "arguments"]
    text = " ".join(page.text)
    assert "llama <on> 16 nodes" in text and REPORT.status in text
    assert "Peak 4 of 16 GiB at 1 s: activations 3, weights 1 GiB." in text
    assert "input_ids (4, 512) became (3, 512)" in text
    assert page.count("rect", **{"class": "span"}) == 2
    assert page.count("tr", **{"class": "marked"}) == 1
    assert page.count("polygon") == 2 and page.count("polyline") == 1


def test_a_page_loads_nothing():
    page = Page(render(REPORT))
    assert not any({"src", "href"} & found.keys() for _, found in page.elements)
    assert "http" not in render(REPORT) and "url(" not in render(REPORT)


def test_parts_that_are_empty_are_left_out():
    page = Page(render(Report("a run", "Simulated.")))
    assert page.count("section") == 0 and page.count("svg") == 0


def test_a_trace_names_cores_and_engines_and_counts_in_microseconds():
    slices = [
        Slice("stage 0", "matrix", "forward 0", 0.0, 1e-3),
        Slice("stage 0", "vector", "forward 0", 0.0, 5e-4),
        Slice("stage 1", "matrix", "forward 0", 1e-3, 1e-3),
    ]
    trace = json.loads(chrome_trace(slices, "predicted"))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [(e["ts"], e["dur"]) for e in events] == [(0, 1000), (0, 500), (1000, 1000)]
    assert [names[e["pid"], e["tid"]] for e in events] == ["matrix", "vector", "matrix"]
    assert trace["otherData"]["status"] == "predicted"


CHECK = """<script>
const box=document.getElementById('filter'),rows=[...document.querySelectorAll('#layout-table tbody tr')];
box.value='mics';box.dispatchEvent(new Event('input'));
document.title='shown '+rows.filter(row=>!row.hidden).map(row=>row.cells[0].textContent).join()
  +' of '+document.querySelectorAll('svg').length+' charts '+document.getElementById('count').textContent;
</script>"""


@pytest.mark.full
def test_the_filter_of_the_layouts_works_in_a_browser(tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs Debian's chromium")
    file = tmp_path / "page.html"
    file.write_text(render(REPORT) + CHECK)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    assert "<title>shown tp=4 mics=4 of 4 charts 1 layouts</title>" in shown.stdout, shown.stderr[-2000:]
