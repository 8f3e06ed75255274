import time
def test_smoke(station):
    t=time.monotonic()
    a = station.chat("How many rows?", max_tokens=8, temperature=0)
    print(a, time.monotonic()-t)
    print(station.stream("/v1/chat/completions", {"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"stream":True}))
    print(station.captured())
    print(station.admin("GET","/admin/stats").json())
    print(station.post("/v1/chat/completions", {"model":"tiny","messages":[], "temperature": float("1")}).text)
