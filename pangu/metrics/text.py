"""Human-readable numbers, durations and sizes."""

from __future__ import annotations


def compact(number: float) -> str:
    """Format a number with about three digits and k, M, G or T: 950 -> `950`, 12_345 -> `12.3k`, 999_960 -> `1.0M`."""
    for unit in ("", "k", "M", "G"):
        # 999.95 would be rounded to 1000.0, which belongs to the next unit.
        if abs(number) < (999.5 if unit == "" else 999.95):
            return f"{number:.1f}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.1f}T"


def quantity(count: int, noun: str) -> str:
    """Return a count with its noun: `1 device`, `1,024 devices`, `2 micro-batches`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def figure(number: float) -> str:
    """Return a number such as 21.05 with two decimals, or three digits and an exponent from a million on."""
    return f"{number:.2f}" if number < 1e6 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """Format a duration with its two largest units: `45 s`, `12 min 05 s`, `3 h 07 min`, `2 d 04 h`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d} h"
    if hours:
        return f"{hours} h {minute:02d} min"
    if minutes:
        return f"{minutes} min {second:02d} s"
    return f"{second} s"


def size(count: float) -> str:
    """Format a number of bytes: `23.84 GiB`; in MiB below 0.1 GiB, in KiB below 0.1 MiB."""
    if count >= 0.1 * 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 0.1 * 2**20 else f"{count / 2**10:.1f} KiB"
