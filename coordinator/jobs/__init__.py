"""Work without a connection: files of requests, and batches that answer their lines.

Files and batches are rows of a database (`storage`), which any of several coordinators may use. One
of them holds a batch (`runner`, `batch_run`), reads its lines (`lines`), and runs each through the
calls table as any caller would (`line_run`), in the lowest class, as far as the cluster has room
(`places`). The answer of a line is written with its mark, once, whoever dies. `routes` has the
paths of OpenAI's files and batches, and of Anthropic's message batches.
"""
