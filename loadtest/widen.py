"""Command line around `paceline.training.widen`: a checkpoint that costs more and says the same.

python -m loadtest widen services/paceline/models/demo-target wide-98m --preset 98m
"""

import sys
from pathlib import Path

from loadtest.flags import bench_parser
from paceline.training.widen import PRESETS, widen


def main() -> int:
    """Parse the command line and widen; returns the exit status."""
    parser = bench_parser("widen", __doc__)
    parser.add_argument("source", type=Path, help="Llama-family checkpoint folder")
    parser.add_argument("out", type=Path, help="new folder, must not exist")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--preset", choices=sorted(PRESETS), help="size the demo target grows to")
    size.add_argument("--intermediate-size", type=int, help="neurons of each feed-forward layer")
    parser.add_argument("--seed", type=int, default=0, help="of the new rows (default: %(default)s)")
    args = parser.parse_args()
    try:
        count = widen(args.source, args.out, args.intermediate_size or PRESETS[args.preset], args.seed)
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        sys.stderr.write(f"widen: {error}\n")
        return 2
    sys.stdout.write(f"{args.out}: {count:,} parameters, same function as {args.source}\n")
    return 0
