"""A server whose event loop is watched: python loop_monitor.py FOLDER prints its port.

GET /held returns how long the event loop was held at most since the last time: the CPU time of its thread between two
turns, in seconds. Other programs on the machine do not add to it, nor do threads that run meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from quire.engine import EngineConfig
from quire.server import EngineProcess, create_app, serve


def main() -> None:
    with EngineProcess(sys.argv[1], EngineConfig(device="cpu", max_num_seqs=64)) as process:
        app = create_app(process.connect(), reasoning_format="none")
        held = [0.0]

        async def watch() -> None:
            last = time.thread_time()
            while True:
                await asyncio.sleep(0.002)
                now = time.thread_time()
                held[0], last = max(held[0], now - last), now

        @app.get("/held")
        async def take() -> float:
            longest, held[0] = held[0], 0.0
            return longest

        def started(server) -> None:
            app.state.watching = asyncio.get_running_loop().create_task(watch())
            print(server.address[1], flush=True)

        # As the commands do.
        gc.collect()
        gc.freeze()
        serve(app, port=0, started=started)


if __name__ == "__main__":
    main()
