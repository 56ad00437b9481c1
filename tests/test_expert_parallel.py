"""The calculated tables of experiments/expert_parallel are those of its page."""

from pathlib import Path

from experiments.expert_parallel import calculate

PAGE = (Path(__file__).parents[1] / "experiments/expert_parallel/README.md").read_text()


def test_page_has_the_calculated_numbers():
    for row in calculate.memory():
        assert f"| {' | '.join(row)} |" in PAGE
    for model, ranks, old, *new in calculate.times():
        if int(ranks) <= calculate.NODE:
            assert f"| {model} | {ranks} | {old} | {' | '.join(new)} |" in PAGE
        else:
            assert old in PAGE
    for ranks, _, _, old, *new in calculate.beside_the_paper():
        known = new if int(ranks) <= calculate.NODE else []
        assert f"| {' | '.join([old, *known])} |" in PAGE
