"""A W&B server on this machine, which speaks what the client sends: GraphQL, the stream of a run's
rows, and uploads.
"""

import gzip
import json

from tests.harness.range_server import Handler, Server

_ME = {"id": "p", "name": "project", "entity": {"id": "e", "name": "me"}}
_VIEWER = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class WandbServer(Server):
    """Keeps runs as W&B does: a run by its id, a row of history at the place that the client names for it.

    It takes no artifacts, so tables are not uploaded.
    """

    def __init__(self) -> None:
        super().__init__(_Requests)
        self.runs: dict[str, dict] = {}
        self.uploads: set[str] = set()  # names of files
        # With which a client uses this server.
        self.environment = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "a" * 40}

    def history(self, run_id: str) -> list[dict]:
        """The rows of a run, in the order in which W&B keeps them."""
        return [json.loads(line) for line in self.runs[run_id]["history"]]

    def answer(self, operation: str, variables: dict) -> dict:
        """The data of a GraphQL operation."""
        name = variables.get("name")
        if operation == "Viewer":
            return {"viewer": _VIEWER}
        if operation == "RunResumeStatus":
            return {"model": _ME | {"bucket": self._bucket(name) if name in self.runs else None}}
        if operation == "UpsertBucket":
            inserted = name not in self.runs
            run = self.runs.setdefault(
                name, {"history": [], "summaryMetrics": "{}", "config": "{}"}
            )
            run |= {key: value for key, value in variables.items() if value}
            return {
                "upsertBucket": {
                    "bucket": self._bucket(name) | {"project": _ME},
                    "inserted": inserted,
                }
            }
        if operation == "CreateRunFiles":
            files = [
                {"name": file, "uploadUrl": f"{self.url}/upload/{file}"}
                for file in variables["files"]
            ]
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, run_id: str, files: dict) -> None:
        """Take in a part of the stream of a run's files."""
        run = self.runs[run_id]
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run["summaryMetrics"] = line
        part = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        run["history"][part["offset"] : part["offset"] + len(part["content"])] = part["content"]

    def _bucket(self, run_id: str) -> dict:
        run = self.runs[run_id]
        counts = {"historyLineCount": len(run["history"]), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps(run["history"][-1:]), "eventsTail": "[]"}
        fields = {key: run[key] for key in ("summaryMetrics", "config")}
        # By which the client sees that the run has begun.
        config = {"wandbConfig": json.dumps({"t": 1})}
        return (
            {"id": run_id, "name": run_id, "displayName": run_id} | fields | counts | tails | config
        )


class _Requests(Handler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self._body()
        answer = {}
        with self.server.lock:
            if self.path == "/graphql":
                query = json.loads(body)
                data = self.server.answer(query["operationName"], query.get("variables") or {})
                answer = (
                    {"data": data}
                    if data
                    else {"errors": [{"message": "this server does not know that"}]}
                )
            elif self.path.endswith("/file_stream"):
                self.server.stream(self.path.split("/")[-2], json.loads(body).get("files", {}))
        self._reply(answer)

    def do_PUT(self) -> None:
        self._body()
        self.server.uploads.add(self.path.removeprefix("/upload/"))
        self._reply({})

    def do_GET(self) -> None:
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, answer: dict) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
