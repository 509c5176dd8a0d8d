"""The kubelet's side: gRPC in both directions, and registration."""

# Before grpclib, which takes hold of asyncio.current_task when it is imported. From Python 3.12 on the original one
# does not know a loop that is a guest of Trio, and each request would fail.
import trio_asyncio  # noqa: F401
