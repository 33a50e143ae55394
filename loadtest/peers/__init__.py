"""Other engines on the same pair, each in an environment of its own in the user's cache folder, never a dependency.

`measure_peers` is what benches call; `make bench NAME=peers` prints its table.
"""

from loadtest.peers.bench import main
from loadtest.peers.run import PEERS, PeerBench, PeerFigure, best_figure, measure_peers

__all__ = ["PEERS", "PeerBench", "PeerFigure", "best_figure", "main", "measure_peers"]
