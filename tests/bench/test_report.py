"""The report as a page and as pictures: everything that was measured is there, and nothing else gets in."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from everstep.benchmarks.harness import charts, pictures, report, results, words
from everstep.errors import BadOption

EXAMPLE = Path(__file__).with_name("example_report.json")
EVIL = "<script>alert('x')</script>&\"q\" $a_b$"
LONG = "torch_checkpointing-async-pinned-shared-memory-with-a-long-name"
PNGS = {
    "aims.png",
    "blocking.png",
    "durable.png",
    "load.png",
    "small.png",
    "timeline.png",
    "training.png",
}
VOID = {"meta", "br", "img", "link", "input", "hr"}
REFERRING = ("src", "href", "xlink:href", "action", "data", "srcset", "poster")


class Page(HTMLParser):
    """What a browser would make of a page: its texts, elements and references. Fails where an end has no beginning."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in REFERRING]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")], attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)


def example() -> results.ReportDict:
    return results.read(EXAMPLE)


def one_workload(name: str) -> results.ReportDict:
    """The example with no other workload, to draw less."""
    found = example()
    found["workloads"] = {name: found["workloads"][name]}
    return found


@pytest.fixture(scope="module")
def text() -> str:
    return report.page(example())


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def drawn() -> dict[str, bytes]:
    return pictures.pngs(example())


def test_all_that_was_measured_is_told(page: Page) -> None:
    for name, one in example()["workloads"].items():
        assert name in page.text and one["meaning"] in page.text and one["cold_by"] in page.text
        for system, told in one["systems"].items():
            assert system in page.text and told["meaning"] in page.text and told["checked"] in page.text
            for note in told["notes"]:
                assert note in page.text
            for samples in told["works"].values():
                for value in (samples["median_s"], samples["min_s"], samples["max_s"]):
                    assert words.seconds(value) in page.text
            if told["memory"]:
                assert words.size(told["memory"]["peak_beyond_copy_bytes"]) in page.text
        for floor, samples in one["floors"].items():
            assert floor in page.text and words.seconds(samples["median_s"]) in page.text
        for system, why in one["left_out"].items():
            assert f"{system} : {why}" in page.text
    assert "2 cores" in page.text and "AMD EPYC 9B14" in page.text and "dlrover 0.5.0" in page.text


def test_ratios_are_those_of_the_results(page: Page) -> None:
    found = results.Found(example()["workloads"])
    floor = found.against_floor("gpt-fp32", "everstep", "blocking")
    rival = found.against_best("gpt-fp32", "everstep", "blocking")
    assert floor is not None and rival is not None
    row = f"everstep {words.times(floor)} × {words.times(rival)} × 70.4 ms"
    assert row in " ".join(page.text.split("dcp-async-process")), (
        "the picture of blocking times has another row"
    )


def test_aims_say_how_far_they_are(page: Page) -> None:
    aims = example()["aims"]
    assert f"Aims: {sum(aim['met'] for aim in aims)} of {len(aims)} met" in page.text
    for aim in aims:
        assert aim["cell"] in page.text and words.times(aim["value"]) in page.text
    assert "✗ missed by 9.7 %" in page.text and "✓ met, 46 % to spare" in page.text
    assert "✗ missed: 12.8 × the aim" in page.text


def test_the_wrong_are_named_and_not_drawn(page: Page) -> None:
    assert "safetensors gave back wrong bytes, and does not count: cold load 2 (round 1)" in page.text
    panel = charts.work_panel(example(), "gpt-fp32", "cold_load")
    assert panel is not None and "safetensors" not in [row.system for row in panel.rows]


def test_a_page_needs_nothing_else(text: str, page: Page) -> None:
    assert [one for one in page.references if not one.startswith("#")] == []
    inner = set(re.findall(r"url\(#([^)]+)\)", text))
    assert inner and inner | {one[1:] for one in page.references} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", text)
    assert not re.search(r"@import|url\((?!#)", text)


def test_the_same_report_gives_the_same_page_and_pictures() -> None:
    found = one_workload("recovery")
    assert report.page(found) == report.page(copy.deepcopy(found))
    assert pictures.pngs(found) == pictures.pngs(found)


def hard() -> results.ReportDict:
    """A workload with names that mean something to browsers and to matplotlib, a tenfold and more between systems, and
    gaps."""
    found = one_workload("gpt-fp32")
    one: Any = found["workloads"]["gpt-fp32"]
    slow = one["systems"]["dcp"]
    for name, factor in ((EVIL, 0.01), (LONG, 1.0), ("检查点-异步", 60.0), ("bell\x07\nline", 2.0)):
        other = copy.deepcopy(slow)
        other["notes"], other["meaning"] = [f"<i>{name}"], f"</td>{name}"
        for samples in other["works"].values():
            samples.update({key: samples[key] * factor for key in ("median_s", "min_s", "max_s")})
        one["systems"][name] = other
    del one["systems"][LONG]["works"]["blocking"]
    one["systems"][EVIL]["memory"] = None
    one["left_out"]["<img src=x onerror=1>"] = "failed: <b>no"
    one["systems"][EVIL]["timelines"] = {"<s>": [{"phase": "<p>", "begin_s": 0.0, "end_s": 0.0}]}
    del one["floors"]["read"]
    found["machine"]["disk"] = "<u>disk"
    found["workloads"] = {f"{EVIL} workload": one}
    return found


def test_names_stay_names() -> None:
    found = hard()
    made = Page(report.page(found))
    assert not {"script", "i", "s", "u", "img"} & set(made.tags)
    for name in (EVIL, LONG, "检查点-异步", "bell\ufffd line"):
        assert name in made.text and f"<i>{name}" in made.text
    assert "<img src=x onerror=1> : failed: <b>no" in made.text and "<u>disk" in made.text
    assert re.search(r"torch_check\w*…[\w-]*long-name", made.text), (
        "too long for a picture, and not shortened"
    )


def test_gaps_do_not_break_it() -> None:
    found = hard()
    name = next(iter(found["workloads"]))
    blocking = charts.work_panel(found, name, "blocking")
    assert blocking is not None and LONG not in [row.system for row in blocking.rows]
    load = charts.work_panel(found, name, "cold_load")
    assert load is not None and load.axis == "times the best rival" and "× floor" not in load.columns
    empty = example()
    empty["workloads"], empty["summary"], empty["aims"] = {}, {}, []
    assert "none of the cells with an aim was measured" in Page(report.page(empty)).text
    assert pictures.pngs(empty) == {}


def test_a_log_axis_only_where_it_is_needed() -> None:
    blocking = charts.work_panel(example(), "gpt-fp32", "blocking")
    load = charts.work_panel(example(), "gpt-fp32", "cold_load")
    assert blocking is not None and blocking.logarithmic
    assert load is not None and not load.logarithmic
    for panel in (blocking, load):
        with charts.settings():
            sheet = charts.Sheet(charts.PANEL, charts.panel_height(panel))
            charts.draw_panel(sheet, panel, charts.looks(example()))
            (axes,) = sheet.figure.axes
        assert ("log axis" in axes.get_xlabel()) == (axes.get_xscale() == "log") == panel.logarithmic
        if not panel.logarithmic:
            assert axes.get_xlim()[0] == 0 and {bar.get_x() for bar in axes.patches} == {0}


def test_systems_look_the_same_everywhere() -> None:
    looks = charts.looks(example())
    assert {"everstep", "dcp", "dlrover"} <= set(looks)
    assert len(set(looks.values())) == len(looks)
    assert {looks[name].colour for name in looks if not results.is_rival(name)} <= set(charts.OURS_COLOURS)


def test_pictures_are_of_a_readmes_size(drawn: dict[str, bytes], tmp_path: Path) -> None:
    from PIL import Image

    assert set(drawn) == PNGS
    for name, content in drawn.items():
        assert 5_000 < len(content) < 200_000, name
        with Image.open(io.BytesIO(content)) as image:
            assert image.width == 1728 and 200 < image.height < 2000, name
            pixels = image.convert("RGB")
            assert pixels.getpixel((2, 2)) == (255, 255, 255)
            box = pixels.convert("L").point(lambda value: 255 if value < 200 else 0).getbbox()
            assert box is not None and box[2] - box[0] > 0.4 * image.width, f"{name} is blank"
            assert box[0] > 0 and box[2] < image.width and box[3] < image.height, f"{name} is clipped"


def test_pictures_are_written(tmp_path: Path) -> None:
    found = one_workload("training")
    written = report.write_pngs(found, tmp_path / "new" / "pictures")
    assert {path.name for path in written} == {"aims.png", "training.png"}
    report.write_html(found, tmp_path / "r.html")
    assert "Slow-down of training" in Page((tmp_path / "r.html").read_text(encoding="utf-8")).text


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert charts.missing() == "matplotlib is not installed: pip install 'everstep[report]'"
    for make in (lambda: report.page(example()), lambda: report.write_pngs(example(), Path("never"))):
        with pytest.raises(BadOption, match=r"pip install 'everstep\[report\]'"):
            make()
    assert not Path("never").exists()


def test_nothing_is_left_in_the_users_directories(tmp_path: Path) -> None:
    """matplotlib keeps settings and a list of fonts: in a directory that goes with the process."""
    code = (
        "import sys; from everstep.benchmarks.harness import charts\n"
        "with charts.settings(): pass\n"
        "import matplotlib; print(matplotlib.get_cachedir()); print('torch' in sys.modules)"
    )
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    own = {"HOME": str(home), "TMPDIR": str(temporary)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "MPL"))} | own
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    directory, torch = out.stdout.split()
    assert Path(directory).is_relative_to(temporary) and torch == "False"
    assert list(home.iterdir()) == [] and list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0000452, "45.2 µs"),
        (0.0704, "70.4 ms"),
        (0.99998, "1.00 s"),
        (1.312, "1.31 s"),
        (46.58, "46.6 s"),
        (None, "–"),
    ],
)
def test_seconds_have_units(value: float | None, said: str) -> None:
    assert words.seconds(value) == said


def test_ratios_have_three_digits_or_two() -> None:
    assert [words.times(x) for x in (0.0387, 0.5437, 1, 12.83, 340.2, 1234.5)] == [
        "0.039",
        "0.544",
        "1.00",
        "12.8",
        "340",
        "1,234",
    ]


def test_long_names_keep_both_ends() -> None:
    assert words.short("dcp-async", 20) == "dcp-async"
    cut = words.short(LONG, 20)
    assert len(cut) == 20 and cut.startswith("torch_che") and cut.endswith("long-name")
    assert len(words.short("检查点检查点检查点", 9)) <= 5


def test_the_example_is_what_the_results_make_of_it() -> None:
    found = json.loads(EXAMPLE.read_text())
    assert found["aims"] and set(found["summary"]) >= {aim["cell"] for aim in found["aims"]}
