"""The tables of docs/kernels.md, from the files that measurements/kernels.py, hopper.py and hopper_backward.py wrote.

python measurements/kernel_tables.py measurements/h200
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def speed(report: dict[str, Any]) -> list[str]:
    """TFLOP/s of this kernel by length, and the geometric mean of the ratio to each peer, a row for each setting."""
    rows = report["speed"]
    lengths = sorted({row["n"] for row in rows})
    lines = ["| direction, D | " + " | ".join(f"N {n}" for n in lengths) + " | × FA2 | × cuDNN |"]
    lines.append("|---|" + "---|" * (len(lengths) + 2))
    settings = dict.fromkeys((row["direction"], row["d"], row["causal"]) for row in rows)
    for direction, d, causal in sorted(settings, key=lambda s: (s[0] != "forward", s[1], s[2])):
        found = [r for r in rows if (r["direction"], r["d"], r["causal"]) == (direction, d, causal)]
        by_length = {row["n"]: row["tflops"]["flash_attention"] for row in found}
        cells = [f"{by_length[n]:.0f}" for n in lengths]
        cells += [f"{_mean(row[f'x_{peer}'] for row in found):.2f}" for peer in ("fa2", "cudnn")]
        lines.append(f"| {direction}, {d}{', causal' if causal else ''} | " + " | ".join(cells) + " |")
    for direction in ("forward", "backward"):
        found = [row for row in rows if row["direction"] == direction]
        means = [f"**{_mean(row[f'x_{peer}'] for row in found):.2f}**" for peer in ("fa2", "cudnn")]
        lines.append(f"| {direction}, all | " + " | ".join([""] * len(lengths) + means) + " |")
    return lines


def memory(report: dict[str, Any]) -> list[str]:
    """Peak bytes of naive and flash attention by length."""
    lines = ["| N | naive, MiB | flash_attention, MiB | ratio |", "|---|---|---|---|"]
    for row in report["memory"]:
        naive, flash = row["naive"] / 2**20, row["flash_attention"] / 2**20
        lines.append(f"| {row['n']} | {naive:,.0f} | {flash:,.0f} | {row['ratio']:.0f} |")
    return lines


def hopper_forward(report: dict[str, Any]) -> list[str]:
    """The frozen maximum in bf16, which is what runs, by length; means of it, of the running maximum, and of fp16."""
    cells = _hopper(report, "speed")
    rows = {setting: found for setting, found in cells.items() if setting[2] == "bf16"}
    lines = _by_length(rows, "freeze", "D")
    for name, form, dtype in (
        ("bf16, as above", "freeze", "bf16"),
        ("bf16, running maximum", "online", "bf16"),
        ("fp16, running maximum", "online", "fp16"),
    ):
        found = [c for (_, _, kind), by_length in cells.items() if kind == dtype for c in by_length.values()]
        lines.append(_summary(name, len(_lengths(rows)), found, form, any("fa3" in c["tflops"] for c in _flat(rows))))
    return lines


def hopper_backward(report: dict[str, Any]) -> list[str]:
    """Both forms by length; means of each over the head dims that it has."""
    cells = _hopper(report, "speed")
    one_pass = {setting: found for setting, found in cells.items() if setting[0] < 256}
    lines = _by_length(one_pass, "onepass", "one pass, D")
    lines += [line.replace("| ", "| two passes, ", 1) for line in _by_length(cells, "twopass", "D")[2:]]
    width = len(_lengths(cells))
    lines.append(_summary("one pass, D 64 and 128", width, _flat(one_pass), "onepass"))
    lines.append(_summary("two passes, D 64 and 128", width, _flat(one_pass), "twopass"))
    wide = {setting: found for setting, found in cells.items() if setting[0] == 256}
    lines.append(_summary("two passes, D 256", width, _flat(wide), "twopass"))
    return lines


def hopper_costs(report: dict[str, Any]) -> list[str]:
    """TFLOP/s as a share: of the even problem's, and, where every tile is repeated, of the running maximum's."""
    repeated = _hopper(report, "late")
    lines = ["| D, N | N − 1 | N + 1 | 8 query heads to a kv head | all repeated |", "|---|---|---|---|---|"]
    for setting, by_length in sorted(_hopper(report, "loss").items()):
        for n, cell in sorted(by_length.items()):
            shares = [f"{cell['ratios'][f'{name}/even']:.2f}" for name in ("minus", "plus", "gqa8")]
            late = repeated.get(setting, {}).get(n)
            shares.append(f"{late['ratios']['repeated/online']:.2f}" if late else "")
            lines.append(f"| {_said(setting)}, N {n} | " + " | ".join(shares) + " |")
    return lines


STAGES = {
    "stage1": "TMA and wgmma, everything in turn",
    "stage2": "+ a warp of its own loads ahead",
    "stage3": "+ the softmax runs under products: those of the block before, and of the other consumer",
    "online": "+ any length, persistent grid, acc rescaled only where the maximum rose by much: the full kernel",
    "freeze": "+ the maximum of the first block, frozen",
}


def hopper_stages(report: dict[str, Any]) -> list[str]:
    """TFLOP/s of each stage of the forward and the geometric mean of its ratio to cuDNN."""
    cells = [cell for cell in report["cells"] if cell["cell"].startswith("turns")]
    heads = []
    for cell in cells:
        _, _, d, causal, n = cell["cell"].split()
        heads.append(f"{_said((int(d), causal == '1', 'bf16'))}, N {n}")
    lines = [f"| D | what it adds | {' | '.join(heads)} | × cuDNN |", "|---|---|" + "---|" * (len(heads) + 1)]
    for stage, what in STAGES.items():
        values = [f"{cell['tflops'][stage]:.0f}" for cell in cells]
        values.append(f"{_mean(cell['ratios'][f'{stage}/cudnn'] for cell in cells):.2f}")
        lines.append(f"| `{stage}` | {what} | {' | '.join(values)} |")
    return lines


def compared(report: dict[str, Any], kind: str, names: tuple[str, ...]) -> list[str]:
    """TFLOP/s of kernels that took turns, each in its fastest tile, a row a setting."""
    lines = [f"| D, N | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for cell in report["cells"]:
        _, what, d, causal, n = cell["cell"].split()
        if what == kind:
            speeds = cell["tflops"]
            best = [max(v for tile, v in speeds.items() if tile.partition("@")[0] == name) for name in names]
            values = " | ".join(f"{value:.0f}" for value in best)
            lines.append(f"| {_said((int(d), causal == '1', 'bf16'))}, N {n} | {values} |")
    return lines


def fp8_speed(report: dict[str, Any]) -> list[str]:
    """TFLOP/s with interleaved keys, and with the quantisers; geometric means of the ratios, to bf16 from N 4096 on."""
    lengths = (1024, 2048, 4096, 8192, 16384)
    peers = ("cudnn fp8", "fa3 fp8", "best peer")
    titles = [*(f"N {n}" for n in lengths), "× bf16, N ≥ 4096", "× cuDNN's", "× FA3's", "× the best of them"]
    titles += ["N 8192, keys in order", "with quantisers, Q and K rotated"]
    lines = [f"| D | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    cells = {tuple(c["cell"].split()[1:4]): c for c in report["cells"] if c["cell"].endswith("block")}

    def means(found: list[dict[str, Any]]) -> list[str]:
        long = [c for c in found if int(c["cell"].split()[3]) >= 4096]
        ratios = [[c["ratios"]["interleaved/bf16"] for c in long]]
        ratios += [[c["ratios"][f"interleaved/{peer}"] for c in found] for peer in peers]
        return [f"{_mean(each):.2f}" for each in ratios]

    for d in (64, 128, 256):
        for causal in ("0", "1"):
            found = [cells[str(d), causal, str(n)] for n in lengths]
            at = cells[str(d), causal, "8192"]["tflops"]
            row = [f"{c['tflops']['interleaved']:.0f}" for c in found] + means(found)
            row += [f"{at[name]:.0f}" for name in ("ordered", "rotated, with quantisers")]
            lines.append(f"| {_said((d, causal == '1', ''))} | {' | '.join(row)} |")
    row = [*("" for _ in lengths), *(f"**{mean}**" for mean in means(list(cells.values()))), "", ""]
    lines.append(f"| all | {' | '.join(row)} |")
    return lines


def fp8_quantisers(report: dict[str, Any]) -> list[str]:
    """The best share of copy bandwidth of each, by head dim."""
    lines = ["| | D 64 | D 128 | D 256 |", "|---|---|---|---|"]
    best = {tuple(c["cell"].split()[1:]): max(c["shares of copy"].values()) for c in report["cells"]}
    for how, said in (("rows", "as it lies"), ("columns", "transposed (V)"), ("rotated", "rotated (Q, K)")):
        lines.append(f"| {said} | " + " | ".join(f"{best[d, 'block', how]:.2f}" for d in ("64", "128", "256")) + " |")
    return lines


Setting = tuple[int, bool, str]
"""D, causal, dtype."""


def _hopper(report: dict[str, Any], kind: str) -> dict[Setting, dict[int, dict[str, Any]]]:
    """The cells of one kind by setting and length. A cell is named "kind D causal N dtype", the backward's without."""
    found: dict[Setting, dict[int, dict[str, Any]]] = {}
    for cell in report["cells"]:
        name, d, causal, n, *dtype = cell["cell"].split()
        if name == kind:
            found.setdefault((int(d), causal == "1", dtype[0] if dtype else "bf16"), {})[int(n)] = cell
    return found


def _by_length(rows: dict[Setting, dict[int, dict[str, Any]]], form: str, head: str) -> list[str]:
    lengths = _lengths(rows)
    fa3 = any("fa3" in cell["tflops"] for cell in _flat(rows))
    titles = ["× FA2", "× cuDNN", *["× FA3"] * fa3, "least × the better of cuDNN and FA3" if fa3 else "least × cuDNN"]
    lines = [f"| {head} | " + " | ".join([*(f"N {n}" for n in lengths), *titles]) + " |"]
    lines.append("|---|" + "---|" * (len(lengths) + len(titles)))
    for setting in sorted(rows):
        found = rows[setting]
        values = [f"{found[n]['tflops'][form]:.0f}" for n in lengths] + _ratios(found.values(), form, fa3)
        lines.append(f"| {_said(setting)} | " + " | ".join(values) + " |")
    return lines


def _summary(name: str, lengths: int, cells: list[dict[str, Any]], form: str, fa3: bool = False) -> str:
    values = [f"**{value}**" if value else "" for value in _ratios(cells, form, fa3)]
    return f"| {name} | " + " | ".join([""] * lengths + values) + " |"


def _ratios(cells: Iterable[dict[str, Any]], form: str, fa3: bool) -> list[str]:
    """Geometric means of the ratios to FA2, cuDNN and, where asked for, FA3 (empty where it has no kernel); the least
    ratio to the better of the last two."""
    of = {
        peer: [c["ratios"][f"{form}/{peer}"] for c in cells if peer in c["tflops"]] for peer in ("fa2", "cudnn", "fa3")
    }
    better = [min(c["ratios"][f"{form}/{peer}"] for peer in ("cudnn", "fa3") if peer in c["tflops"]) for c in cells]
    means = [f"{_mean(of[peer]):.2f}" if of[peer] else "" for peer in ("fa2", "cudnn", *["fa3"] * fa3)]
    return [*means, f"{min(better):.2f}"]


def _lengths(rows: dict[Setting, dict[int, dict[str, Any]]]) -> list[int]:
    return sorted({n for by_length in rows.values() for n in by_length})


def _flat(rows: dict[Setting, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [cell for by_length in rows.values() for cell in by_length.values()]


def _said(setting: Setting) -> str:
    d, causal, _ = setting
    return f"{d}, causal" if causal else f"{d}"


def _mean(ratios: Any) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def tables(folder: Path) -> dict[str, list[str]]:
    """Every table by the marker under which docs/kernels.md has it."""
    kernels, forward, backward, stages, turns, fp8, quantisers = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in (
            "kernels",
            "hopper-forward",
            "hopper-backward",
            "hopper-stages",
            "hopper-compared",
            "fp8-speed",
            "fp8-quantisers",
        )
    )
    return {
        "kernel-speed": speed(kernels),
        "kernel-memory": memory(kernels),
        "hopper-forward": hopper_forward(forward),
        "hopper-backward": hopper_backward(backward),
        "hopper-costs": hopper_costs(forward),
        "hopper-stages": hopper_stages(stages),
        "fp8-speed": fp8_speed(fp8),
        "fp8-quantisers": fp8_quantisers(quantisers),
        "compared-v1": compared(turns, "v1", ("v1", "plain", "fa2", "cudnn")),
        "compared-atomic": compared(
            turns, "atomic", ("atomic", "plain_backward", "fa2", "onepass", "twopass", "cudnn")
        ),
    }


if __name__ == "__main__":
    print("\n\n".join("\n".join(lines) for lines in tables(Path(sys.argv[1])).values()))
