"""A minimal frontend for one prefill and one decode server. Each completion is prefilled at one and decoded at the
other; the prefill server says in `kv_transfer_params` where the decode server finds the cache.

    proxy.py PORT PREFILL_URL DECODE_URL
"""
import http.server
import json
import sys
import urllib.error
import urllib.request

WILL_DECODE_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                         "remote_block_ids": None, "remote_host": None, "remote_port": None}


def ask(url, body):
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


class Proxy(http.server.BaseHTTPRequestHandler):
    def do_POST(self):  # pylint: disable=invalid-name
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prefill, decode = sys.argv[2:]
        try:
            first = ask(prefill, {**body, "max_tokens": 1, "kv_transfer_params": WILL_DECODE_ELSEWHERE})
            status, answer = 200, ask(decode, {**body, "kv_transfer_params": first["kv_transfer_params"]})
        except urllib.error.HTTPError as error:
            status, answer = error.code, {"error": error.read().decode(errors="replace")}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Proxy).serve_forever()
