"""The mutation script makes the changes that it says, the same ones for a seed, and notices a failing test."""

import ast
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools/mutate.py")
mutate = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutate)


def test_mutations_are_valid_and_repeatable():
    chosen = mutate.sample(7, 40)
    assert chosen == mutate.sample(7, 40) and len({*chosen}) == 40
    for mutation in chosen:
        source = (ROOT / mutation.path).read_text()
        mutated = mutation.apply(source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), mutation


def test_every_file_has_tests():
    for path in mutate.PACKAGE.rglob("*.py"):
        below = str(path.relative_to(mutate.PACKAGE))
        names = next(tests for beginning, tests in mutate.TESTS.items() if below.startswith(beginning))
        assert all((ROOT / "tests" / name).exists() for name in names), below


def test_a_failing_test_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").write_text("def test():\n    pass\n")
    (tmp_path / "tests/test_two.py").write_text("def test():\n    assert False\n")
    monkeypatch.setattr(mutate, "TESTS", {"a": ["test_one.py"], "": ["test_one.py", "test_two.py"]})
    assert mutate.notice(tmp_path, mutate.Mutation("titan_fp8moe/a.py", (1, 0), (1, 0), "")) is None
    assert mutate.notice(tmp_path, mutate.Mutation("titan_fp8moe/b.py", (1, 0), (1, 0), "")) == "test_two.py"
