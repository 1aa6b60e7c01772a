"""The tables of benchmarks/run.py, from its record."""

from __future__ import annotations

from typing import Any

GB = 1e9
TOP = 12


def table(record: dict[str, Any]) -> str:
    """Text for a terminal."""
    lines = [f"{record['device']}; commit {record['commit']}; {record['date']} UTC", ""]
    header = f"{'mode':<5} {'':<9} {'tokens/s':>9} {'ratio':>6} {'s a step':>9} {'processor s':>12} {'others':>7} "
    header += f"{'peak RSS':>9}"
    lines.append(f"{header} {'ratio':>6} {'plan':>9} {'sgemm share':>12} {'first loss':>11}")
    for mode in record["modes"]:
        lines += _sides(mode)
    for mode in record["modes"]:
        c = mode["ceilings"]
        lines.append(
            f"\n{mode['mode']}: matrix product {c['product'] / GB:.0f} GFLOP/s, copy {c['copy'] / GB:.1f} GB/s"
        )
        if "profile" in mode:
            lines += _profile(mode)
    return "\n".join(lines)


def _sides(mode: dict[str, Any]) -> list[str]:
    sides, lines = mode["sides"], []
    torch = sides.get("torch")
    for name, s in sides.items():
        own = name == "surogate"
        speed = f"{s['tokens_per_second'] / torch['tokens_per_second']:.2f}x" if own and torch else ""
        memory = f"{s['peak_rss'] / torch['peak_rss']:.2f}x" if own and torch else ""
        plan = f"{sum(s['plan'].values()) / GB:.2f} GB" if own else ""
        share = f"{share_of_product(mode):.0%}" if own else ""
        lines.append(
            f"{mode['mode']:<5} {name:<9} {s['tokens_per_second']:>9.0f} {speed:>6} {s['seconds']:>9.2f} "
            f"{s['processor']:>12.2f} {s['others']:>7.2f} {s['peak_rss'] / GB:>6.2f} GB {memory:>6} {plan:>9} "
            f"{share:>12} "
            f"{s['first_loss']:>11.5f}"
        )
    return lines


def share_of_product(mode: dict[str, Any]) -> float:
    """Rate of the whole step, as a share of one large matrix product's. Recomputation is no useful work."""
    own = mode["sides"]["surogate"]
    return float(own["flops"] / own["seconds"] / mode["ceilings"]["product"])


def floor(row: dict[str, Any], ceilings: dict[str, Any]) -> float:
    """Seconds that the ceilings allow for this work."""
    best = {name: max(c[name] for c in ceilings["all"]) for name in ("product", "copy")}
    return float(max(row["flops"] / best["product"], row["nbytes"] / best["copy"]))


def _profile(mode: dict[str, Any]) -> list[str]:
    rows = sorted(mode["profile"], key=lambda row: -row["seconds"])
    whole, best = sum(row["seconds"] for row in rows), sum(row["best"] for row in rows)
    lines = [
        f"  {'':<30} {'calls':>6} {'ms':>8} {'share':>6} {'best ms':>8} {'floor ms':>9} {'of best':>8} "
        f"{'GFLOP/s':>8} {'GB/s':>6}"
    ]
    for row in rows[:TOP]:
        seconds, least = max(row["best"], 1e-9), floor(row, mode["ceilings"])
        lines.append(
            f"  {row['family']:<30} {row['calls']:>6} {1e3 * row['seconds']:>8.1f} {row['seconds'] / whole:>6.1%} "
            f"{1e3 * seconds:>8.1f} {1e3 * least:>9.1f} {least / seconds:>8.0%} {row['flops'] / seconds / GB:>8.0f} "
            f"{row['nbytes'] / seconds / GB:>6.1f}"
        )
    rest, rest_best = (sum(row[key] for row in rows[TOP:]) for key in ("seconds", "best"))
    lines.append(f"  {'the rest':<30} {'':>6} {1e3 * rest:>8.1f} {rest / whole:>6.1%} {1e3 * rest_best:>8.1f}")
    least = sum(floor(row, mode["ceilings"]) for row in rows)
    ends = f"{1e3 * best:>8.1f} {1e3 * least:>9.1f} {least / best:>8.0%}"
    lines.append(f"  {'step':<30} {'':>6} {1e3 * whole:>8.1f} {'':>6} {ends}")
    return lines
