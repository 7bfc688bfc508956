"""How fast a checkpoint loads and what it costs: seconds, GB/s, host and device memory.

    python -m bench.load MODEL [--json bench/results/load.json]

The first load may read from disk; the second finds the files in the page cache.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

from bench.results_file import write_results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.load", description="How fast a checkpoint loads.")
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory")
    parser.add_argument("--repeats", type=int, default=2, help="loads (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--commit", help="the code's commit (default: what git says)")
    arguments = parser.parse_args(argv)

    import jax

    from qwen35_jax import load_checkpoint
    from qwen35_jax.model.transformer import parameter_bytes, parameter_count

    device = jax.devices()[0]
    jax.block_until_ready(jax.numpy.zeros(()))
    before = _own_bytes()
    print(f"host memory of the process with the device ready: {before or 0:,} bytes", flush=True)
    rows = []
    model = {}
    for number in range(1, arguments.repeats + 1):
        started = time.perf_counter()
        params = load_checkpoint(arguments.model, progress=False)
        seconds = time.perf_counter() - started
        weights = parameter_bytes(params)
        statistics = device.memory_stats() or {}
        row = {
            "load": number,
            "seconds": round(seconds, 3),
            "gb_per_s": round(weights / 1e9 / seconds, 3),
            "weight_bytes": weights,
            "device_bytes_in_use": statistics.get("bytes_in_use"),
            "device_peak_bytes": statistics.get("peak_bytes_in_use"),
            # Counts mapped file pages as well as the process's own memory.
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "host_own_bytes": _own_bytes(),
            "host_own_bytes_before": before,
        }
        rows.append(row)
        model = {"path": Path(arguments.model).name, "parameters": parameter_count(params)}
        print(row, flush=True)
        del params
    if arguments.json:
        command = f"python -m bench.load MODEL --repeats {arguments.repeats}"
        write_results(
            arguments.json,
            name="load",
            command=command,
            model=model,
            flags={"repeats": arguments.repeats},
            rows=rows,
            commit=arguments.commit,
        )
    return 0


def _own_bytes() -> int | None:
    """The process's memory that is not file pages, now."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)


if __name__ == "__main__":
    sys.exit(main())
