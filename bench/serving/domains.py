"""One request at a time of every domain: what speculation gains where the drafter is at home, and
what it costs where it is not."""

from bench.prompts import ALL_DOMAINS
from bench.serving.intervals import Interval
from bench.serving.runs import alternate
from bench.serving.setup import AUTO, OFF, Bench, Figure


def domains(bench: Bench) -> list[Figure]:
    """speedup_worst_domain: with the automatic lookahead against none, on every domain."""
    found: dict[str, Interval] = {}
    details: dict[str, object] = {}
    for domain in ALL_DOMAINS:
        prompts = bench.domain(domain.name, bench.sizes.domain)
        runs = alternate(
            bench,
            prompts,
            {
                "auto": lambda prompt, runs: runs.add_served(
                    bench.engine.serve([prompt], speculation=AUTO)
                ),
                "off": lambda prompt, runs: runs.add_served(
                    bench.engine.serve([prompt], speculation=OFF)
                ),
            },
            title=domain.name,
        )
        auto, off = runs["auto"], runs["off"]
        found[domain.name] = auto.over(off)
        details[domain.name] = {
            "speedup": found[domain.name].text(),
            "acceptance": auto.acceptance,
            "identical": sum(a == b for a, b in zip(auto.ids, off.ids, strict=True)),
            "temperature": prompts[0].sampling.temperature,
        }
        bench.console.print(f"{domain.name}: {details[domain.name]}")
    worst = min(found, key=lambda name: found[name].value)
    return [
        Figure(
            metric="speedup_worst_domain",
            value=found[worst].value,
            unit="ratio",
            against="the same engine without speculation",
            interval=found[worst],
            conditions={
                "domain": worst,
                "domains": details,
                "prompts_each": bench.sizes.domain,
            },
        )
    ]
