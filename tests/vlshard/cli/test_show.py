"""``python -m vlshard show`` and ``check``: whole outputs."""

import json
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from model.config.config import Config
from tests.tiny import TINY
from vlshard.cli.arguments import read_mesh
from vlshard.cli.main import main
from vlshard.language.mesh_shape import MeshShape

SVG = "{http://www.w3.org/2000/svg}"


def test_show_draws_who_holds_what(capsys):
    arguments = ["b s@cp.zigzag h@tp d", "--mesh", "cp=2,tp=2", "--sizes", "s=16,h=8"]
    assert main(["show", *arguments]) == 0
    assert (
        capsys.readouterr().out
        == """\
sizes: b=2 s=16 h=8 d=2

b s@cp.zigzag h@tp d  on cp=2 tp=2

ranks  cp  tp  s@cp.zigzag: 16              h@tp: 8        local shape
0      0   0   ####........####  0-3 12-15  ####....  0-3  2 8 4 2
1      0   1   ####........####  0-3 12-15  ....####  4-7  2 8 4 2
2      1   0   ....########....  4-11       ####....  0-3  2 8 4 2
3      1   1   ....########....  4-11       ....####  4-7  2 8 4 2
"""
    )


def test_show_draws_segments_in_units_and_says_who_holds_the_same(capsys):
    packed = ["--lengths", "24,16,48", "--unit", "4"]
    assert main(["show", "(img s)@cp c + tp", "--mesh", "dp=2,cp=2,tp=1", *packed]) == 0
    assert (
        capsys.readouterr().out
        == """\
sizes: img=24,16,48 c=2

(img s)@cp c + tp  on dp=2 cp=2 tp=1

ranks  cp  (img s)@cp: 88                   local shape
0 2    0   ######|####|#...........  0-43   44 2
1 3    1   ......|....|.###########  44-87  44 2

(img s)@cp: a cell is a unit of 4 rows, | ends a segment
(img s)@cp: the busiest rank has 1.00 times the mean of rows, 1.00 of cost
ranks that differ along dp alone hold the same indices
a sum over tp is pending: what they hold are terms of it
"""
    )


def test_show_keeps_segments_at_home(capsys):
    packed = ["--lengths", "4,2,2", "--home", "1,0,1"]
    assert main(["show", "(img@dp.home s)", "--mesh", "dp=2", *packed]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "sizes: img=4,2,2 at home 1,0,1"
    assert main(["show", "b@dp.home s", "--mesh", "dp=2"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "sizes: b=4 at home 0,0,1,1 s=2"


def test_show_says_how_even_a_deal_is(capsys):
    # Costs n^2 of 64, 16, 16 and 36 go to ranks 0, 1, 1 and 1: 64 and 68, the mean is 66.
    dealt = ["--lengths", "8,4,4,6", "--cost", "1,0", "--mesh", "cp=ring:2/tail:1"]
    assert main(["show", "(img@cp.balance s)", *dealt]) == 0
    assert (
        capsys.readouterr().out
        == """\
sizes: img=8,4,4,6

(img@cp.balance s)  on cp=(ring=2, tail=1)

ranks  cp.ring  cp.tail  (img@cp.balance s): 22           local shape
0      0        0        ########|....|....|......  0-7   8
1      1        0        ........|####|####|######  8-21  14

(img@cp.balance s): a cell is a unit of one row, | ends a segment
(img@cp.balance s): the busiest rank has 1.27 times the mean of rows, 1.03 of cost
"""
    )


def test_show_draws_long_dims_to_scale(capsys):
    assert main(["show", "s@cp", "--mesh", "cp=2", "--sizes", "s=100"]) == 0
    assert (
        capsys.readouterr().out
        == """\
sizes: s=100

s@cp  on cp=2

ranks  cp  s@cp: 100                                                local shape
0      0   ########################........................  0-49   50
1      1   ........................########################  50-99  50

s@cp: a cell is about 2 rows, + is held in part
"""
    )
    main(["show", "s@cp", "--mesh", "cp=3", "--sizes", "s=100"])
    assert " ################+...............................  0-33 " in capsys.readouterr().out


def test_show_lists_the_first_of_many_holders(capsys):
    mesh = ["--mesh", "dp=64,cp=64,tp=16"]
    assert main(["show", "b@dp s@cp h", *mesh, "--sizes", "b=0,s=9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5] == "0 1 2 3 +12          0   0     nothing  #........  0        0 1 2"
    assert lines[-3] == "... and 4,080 more"


def test_show_takes_meshes_and_sizes_of_any_size(capsys):
    mesh = ["--mesh", "dp=1000000000,cp=1000000000"]
    assert main(["show", "b@dp s", *mesh, "--sizes", "b=1000000000000"]) == 0
    *ranks, place, cells, runs, _, _ = capsys.readouterr().out.splitlines()[6].split()
    assert ranks == ["1000000000", "1000000001", "1000000002", "1000000003", "+999999996"]
    assert (place, cells, runs) == ("1", "+" + "." * 47, "1000-1999")
    assert main(["show", "(h@tp d)", "--mesh", "tp=2", "--sizes", "h=1000000000000000"]) == 0
    assert capsys.readouterr().out.splitlines()[5].split()[-2:] == [
        "0-999999999999999",
        "1000000000000000",
    ]
    assert main(["show", "(d h@tp)", "--mesh", "tp=2", "--sizes", "d=1000000000000000,h=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].split() == ["0", "0", "not", "drawn", "1000000000000000"]
    assert lines[-1] == "(d h@tp): what more than 1,048,576 runs hold is not drawn"


def test_show_draws_many_runs_and_segments_to_scale(capsys, tmp_path):
    mesh = ["--mesh", "dp=32,cp=8", "--lengths", ",".join(["1024"] * 3200), "--unit", "4"]
    assert main(["show", "(img s@cp.zigzag) c", *mesh]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = "0-63 960-1087 1984-2111 3008-3135 +3197 more".split()
    assert lines[5].split()[5:-2] == ["0", "+" * 48, *runs]
    assert main(["show", "(img s@cp.zigzag) c", *mesh, "--svg", str(tmp_path / "a.svg")]) == 0
    picture = (tmp_path / "a.svg").read_text()
    assert picture.count("<rect") == 1 + 8 * 401
    assert "the ends of 3,200 segments are not drawn" in picture
    assert "what more than 400 runs hold is drawn in 400 columns" in picture


def test_show_draws_before_program_and_after(capsys):
    assert main(["show", "b s@cp h d -> b s h@cp d", "--mesh", "cp=2", "--sizes", "b=1,d=3"]) == 0
    shown = capsys.readouterr().out
    before, steps, after = shown.split("\n\n")[2], shown.split("\n\n")[3], shown.split("\n\n")[5]
    assert "AllToAll s -> h over cp" in steps
    assert "48 bytes" in steps  # a rank holds 24 floats and sends half of them
    assert before.splitlines()[1] == "0      0   ##..  0-1  1 2 4 3"
    assert after.splitlines()[1] == "0      0   ##..  0-1  1 4 2 3"


def test_show_counts_the_bytes_of_one_rank_of_many(capsys):
    assert main(["show", "b@dp s -> b s", "--mesh", "dp=131072", "--sizes", "b=131072,s=3"]) == 0
    # One row of 12 bytes to 131,071 ranks.
    line = "rank 0 sends 1,572,852 bytes, in backward 1,572,852\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("", MeshShape()),
        ("dp=2, cp=4", MeshShape(dp=2, cp=4)),
        ("cp=2x4,tp=1", MeshShape(cp=(2, 4), tp=1)),
        ("cp=ring:2/ulysses:4", MeshShape(cp={"ring": 2, "ulysses": 4})),
    ],
)
def test_read_mesh(text, mesh):
    assert read_mesh(text) == mesh


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["b s@xp", "--mesh", "cp=2"],
            """\
LayoutError: unknown mesh axis 'xp'
  b s@xp
      ^^
  mesh: cp=2; did you mean 'cp'?
""",
        ),
        (
            ["b s@", "--mesh", "cp=2"],
            """\
SpecError: '@' needs a mesh axis after it
  b s@
     ^
""",
        ),
        (
            ["b", "--mesh", "dp=2, cp:4"],
            """\
PlanError: 'cp:4' is no mesh axis
  --mesh: dp=2, cp:4
                ^^^^
  a mesh is written 'dp=2,cp=4'; axes with parts 'cp=2x4' or 'cp=ring:2/ulysses:4'
""",
        ),
        (
            ["b", "--mesh", "dp=2,cp=2x1234567890123456789"],
            """\
PlanError: a size has at most 18 digits
  --mesh: dp=2,cp=2x1234567890123456789
               ^^^^^^^^^^^^^^^^^^^^^^^^
  a mesh is written 'dp=2,cp=4'; axes with parts 'cp=2x4' or 'cp=ring:2/ulysses:4'
""",
        ),
        (
            ["itemsize -> itemsize", "--mesh", "dp=2"],
            """\
LayoutError: no dim of an arrow can be named 'itemsize' here
  what is sent is counted with itemsize= beside the sizes: name the dim otherwise
""",
        ),
        (
            ["b", "--mesh", "dp=2,dp=2"],
            """\
PlanError: mesh axis 'dp' occurs twice
  --mesh: dp=2,dp=2
               ^^^^
  a mesh is written 'dp=2,cp=4'; axes with parts 'cp=2x4' or 'cp=ring:2/ulysses:4'
""",
        ),
        (
            ["b", "--mesh", "dp=0"],
            """\
PlanError: mesh axis dp=0: a size is at least 1
""",
        ),
        (
            ["(img s)@cp", "--unit", "4"],
            """\
LayoutError: --unit is for segments, of which there are none
  fix: give their lengths too, --lengths 24,16,48, or leave it out
""",
        ),
        (
            ["b s", "--sizes", "b=1,s"],
            """\
LayoutError: 's' is no size of a dim
  --sizes: b=1,s
               ^
  sizes are written 's=16,h=8'
""",
        ),
        (
            ["b sq", "--sizes", "b=1,s=3"],
            """\
LayoutError: size s= is for no dim of the spec
  names: b sq; did you mean 'sq'?
""",
        ),
        (
            ["(img s)", "--lengths", "4,x"],
            """\
LayoutError: 'x' is no integer
  --lengths: 4,x
               ^
  --lengths takes integers: '24,16,48'
""",
        ),
        (
            ["img s", "--lengths", "4"],
            """\
LayoutError: --lengths is for a bracket of two names, the segments and their rows: '(img s)'
  img s
""",
        ),
        (
            ["(img s)", "--lengths", "4", "--sizes", "s=4"],
            """\
LayoutError: 's' takes no size: --lengths has them
  (img s)
  ^^^^^^^
""",
        ),
        (
            ["(img s)", "--lengths", "6", "--unit", "4"],
            """\
LayoutError: packing: segment 0 has 6 rows, no multiple of unit 4
  a unit is never cut: pad it to 8 rows
""",
        ),
        (
            ["(img@dp.home s)@cp", "--mesh", "dp=2,cp=2", "--lengths", "4,8"],
            """\
LayoutError: '.home' needs --home: who loaded each of the 2 segments
  (img@dp.home s)@cp
          ^^^^
""",
        ),
        (
            ["b s@cp"],
            """\
LayoutError: unknown mesh axis 'cp'
  b s@cp
      ^^
  mesh: no axes
""",
        ),
        (
            ["b@dp.home", "--mesh", "dp=2", "--sizes", "b=3"],
            """\
LayoutError: --home has to name the holder of each of the 3 rows
  b@dp.home
  ^
""",
        ),
        (
            ["b", "--svg", "/no/such/folder/a.svg"],
            """\
LayoutError: cannot write /no/such/folder/a.svg: No such file or directory
""",
        ),
    ],
)
def test_show_refuses_wrong_input_with_one_message(arguments, message, capsys):
    assert main(["show", *arguments]) == 2
    assert capsys.readouterr().err == message


def test_show_is_coloured_where_that_can_be_seen(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    arguments = ["show", "s@cp", "--mesh", "cp=2"]
    main(arguments)
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(arguments)
    coloured = capsys.readouterr().out
    assert "\x1b[1;34m##\x1b[0m.." in coloured
    assert "..\x1b[1;33m##\x1b[0m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    main(arguments)
    assert capsys.readouterr().out == plain


def test_show_writes_a_picture_to_scale(tmp_path, capsys):
    file = tmp_path / "out.svg"
    packed = ["--lengths", "12,4", "--unit", "4", "--svg", str(file)]
    assert main(["show", "(img s)@cp c -> (img s) c", "--mesh", "cp=2", *packed]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    root = ElementTree.fromstring(file.read_text())
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("x")]
    left = min(float(box.get("x")) for box in boxes)
    bars = [(box.get("fill"), float(box.get("x")) - left, box.get("width")) for box in boxes]
    ends = ("white", pytest.approx(360 - 0.75, abs=0.01), "1.5")
    assert bars == [
        ("#e4e4e4", 0, "480"),
        ("#0072b2", 0, "240"),
        ends,
        ("#e4e4e4", 0, "480"),
        ("#e69f00", pytest.approx(240), "240"),
        ends,
    ]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "(img s)@cp c  on cp=2"
    assert any(text.startswith("  AllGather (img s) over cp") for text in texts)
    assert "local shape 16 2" in texts


def tiny_config(folder):
    """The config that the command line asks for; ``folder`` is what ``--model`` names."""
    assert folder in (None, "here")
    return Config.from_dict(TINY)


def check(*arguments):
    return main(["check", *arguments, "--model", "here", "--config", f"{__name__}:tiny_config"])


def test_check_says_that_a_plan_fits(capsys):
    assert check("plans/vision_cp_ulysses.py", "--world", "4") == 0
    assert capsys.readouterr().out == "plans/vision_cp_ulysses.py fits: 4 ranks as dp=2 cp=2\n"


def test_check_says_where_a_mode_has_nothing_to_do(capsys, tmp_path):
    plan = Path("plans/vision_cp_colossal.py").read_text()
    path = tmp_path / "dealt.py"
    path.write_text(plan.replace("(img@dp.home s)@cp c", "(img@dp.home@cp.balance s) c"))
    assert check(str(path), "--world", "4") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path} fits: 4 ranks as dp=2 cp=2",
        "  gather('cp') of vision sends nothing over cp: vision.patches has no segment that is cut "
        "over it",
    ]


def test_check_prints_every_fault(capsys, tmp_path):
    plan = Path("plans/vision_cp_ulysses.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(plan.replace("s@cp.zigzag m", "s@xp m").replace('"vision": u', '"visoin": u'))
    assert check(str(broken), "--world", "4") == 1
    out = capsys.readouterr().out
    assert "PlanError: " in out
    assert "LayoutError: unknown mesh axis 'xp'" in out


def test_check_refuses_what_is_no_plan_or_no_config(capsys):
    assert check("plans/none.py", "--world", "4") == 2
    assert capsys.readouterr().err.startswith("PlanError: no plan file 'plans/none.py'\n")
    arguments = ["check", "plans/single.py", "--world", "1", "--config"]
    assert main([*arguments, "os:sep"]) == 2
    assert (
        capsys.readouterr().err == "PlanError: --config os:sep gives a str, not a model's config\n"
    )
    assert main([*arguments, "os:nothing"]) == 2
    assert "module 'os' has no attribute 'nothing'" in capsys.readouterr().err
    assert main([*arguments, "model.config"]) == 2
    assert capsys.readouterr().err == (
        "PlanError: --config takes module:function, not 'model.config'\n"
        "  for example model.config:load_config, with the folder that --model names\n"
    )


def test_check_reads_the_model_that_a_folder_names(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    arguments = ["check", "plans/vision_cp_ulysses.py", "--world", "4"]
    assert main([*arguments, "--model", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "plans/vision_cp_ulysses.py fits: 4 ranks as dp=2 cp=2\n"
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        "PlanError: which model? --model names its folder, or --config gives its config\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "qwen3_vl_mo"}))
    assert main([*arguments, "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"PlanError: {tmp_path}/config.json: no model is installed that reads model_type "
        "'qwen3_vl_mo'; did you mean 'qwen3_vl_moe'?\n"
        "  installed: qwen3_vl_moe\n  --config module:function gives one\n"
    )


def test_check_refuses_a_world_without_ranks(capsys):
    assert check("plans/vision_sample.py", "--world", "0") == 2
    headline = "PlanError: --world is a number of ranks, at least 1, not 0\n"
    assert capsys.readouterr().err == headline


def test_check_names_the_line_of_a_mode(capsys, tmp_path):
    plan = Path("plans/vision_cp_ulysses.py").read_text()
    line = 1 + plan[: plan.index('"vision": ulysses')].count("\n")
    path = tmp_path / "mode.py"
    path.write_text(plan.replace('ulysses("cp")', 'ulysses("xp")'))
    check(str(path), "--world", "4")
    assert capsys.readouterr().out.startswith(
        "PlanError: unknown mesh axis 'xp' in attention\n"
        f"  {path}:{line} attention 'vision'\n"
        "  mesh: dp=2 cp=2; did you mean 'cp' or 'dp'?\n"
    )


def test_the_module_can_be_run(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vlshard", "show", "s", "--sizes", "s=3"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("vlshard", run_name="__main__")
    assert exit.value.code == 0
    assert "local shape\n0      3\n" in capsys.readouterr().out
