"""Tables of what was measured or computed rather than trained: speed, memory, scaling, theory, network sizes."""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import scaling
from torch import nn

from iterand.lab.benchmarks import table
from iterand.lab.networks import network_outline
from iterand.lab.report.formatting import machine, size

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "results" / "records" / "benchmarks"

Lines = list[str]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Lines:
    """A table whose first ``left`` columns are text."""
    rule = ["---" if number < left else "---:" for number in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def read_json(name: str) -> Any:
    """A record of a benchmark."""
    return json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))


def read_text(name: str) -> str:
    """The same, where it is what a program printed."""
    return (BENCHMARKS / name).read_text(encoding="utf-8")


def conditions(record: Mapping[str, Any], what: str) -> Lines:
    """The caption of a table of a benchmark."""
    environment = record["environment"]
    triton = f", Triton {environment['triton']}" if "triton" in environment else ""
    versions = f"torch {environment['torch']}{triton}"
    commit = f", commit {environment['commit'][:7]}" if environment.get("commit") else ""
    return [f"*{what}; {machine(environment)}, {versions}{commit}; `{_short(environment['command'])}`.*", ""]


def _short(command: str) -> str:
    """A command without the names of many tickets, which are in the record."""
    return re.sub(r"( --network)? [\w-]+\.ticket(?:(?: --network)? [\w-]+\.ticket){2,}", r"\1 TICKET …", command)


def benchmarks() -> Lines:
    """All records of ``iterand bench``."""
    lines = Lines()
    for path in sorted(BENCHMARKS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("format") != "iterand benchmark 1":
            continue
        for name, result in record["benchmarks"].items():
            lines += [f"## {name}: {machine(record['environment'])} (`{path.name}`)", ""]
            lines += conditions(record, "Median (10th–90th percentile)")
            lines += [*_bench(result["rows"]), "", *(f"- {note}" for note in result["notes"]), ""]
        if record["targets"]:
            lines += [f"### Targets (`{path.name}`)", "", *_bench(record["targets"]), ""]
    return lines[:-1]


def _bench(rows: Sequence[Mapping[str, Any]]) -> Lines:
    columns = table.columns(rows)
    right = ["---:" if any(table.is_number(row.get(column)) for row in rows) else "---" for column in columns]
    entries = [[table.cell(column, row.get(column)).replace("|", r"\|") for column in columns] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([table.heading(column) for column in columns], right, *entries)]


def _rows(name: str, benchmark: str, *keys: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in read_json(name)["benchmarks"][benchmark]["rows"]}


def engine_step() -> Lines:
    """A step of each network and method, as a graph."""
    graph, compiled = (
        _rows(name, "step", "network", "method") for name in ("step-h200.json", "step-compiled-h200.json")
    )
    titles = {"conv6": "Conv6", "resnet18": "ResNet18", "resnet50": "ResNet50 (224 × 224)"}
    rows = []
    for network, title in titles.items():
        own = [graph[network, method] for method in ("sgd", "edge_popup", "iterand")]
        rows.append([
            title, *(_number(row["milliseconds"]["median"]) for row in own),
            f"{own[2]['ratio_to_dense']['median']:.3f}", f"{own[2]['memory_ratio']:.2f}",
            _number(compiled[network, "sgd"]["milliseconds"]["median"]),
            _number(compiled[network, "iterand"]["milliseconds"]["median"]),
        ])  # fmt: skip
    what = "Milliseconds of a training step as one CUDA graph, batch 128, bfloat16, median of 9 rounds; "
    what += "ratio and memory are "
    what += "IteRand ÷ SGD; compiled steps at commit 752531a"
    head = ["", "SGD", "edge-popup", "IteRand", "ratio", "memory", "SGD, compiled", "IteRand, compiled"]
    return [*conditions(read_json("step-h200.json"), what), *markdown(head, rows)]


def engine_loop() -> Lines:
    """A step of other people's models, by a plain loop and by make_step."""
    titles = {
        "resnet18": "ResNet18 (32 × 32)", "timm:resnet18": "timm resnet18", "timm:resnet50": "timm resnet50",
        "timm:vit_tiny_patch16_224": "timm vit_tiny", "bert": "BERT-base (128 tokens)",
    }  # fmt: skip
    names = ("loop-resnet18-h200.json", "loop-h200.json")
    found = {key: row for name in names for key, row in _rows(name, "loop", "network", "execution", "method").items()}
    rows = []
    for network, title in titles.items():
        cells = [title, str(found[network, "eager", "dense"]["batch"])]
        for execution in ("eager", "make_step"):
            masked = found[network, execution, "masked"]
            times = [found[network, execution, method]["milliseconds"]["median"] for method in ("dense", "masked")]
            cells += [*map(_number, times), f"{masked['ratio_to_dense']['median']:.2f}"]
        cells += [f"{masked['speedup_over_eager']['median']:.1f}", f"{masked['memory_ratio']:.2f}"]
        rows.append(cells)
    what = "Milliseconds of a training step, bfloat16, median of 9 rounds in which all take turns; "
    what += "224 × 224 images where not said otherwise; ratios are medians of masked ÷ "
    what += "dense within a round; ResNet18 (32 × 32) at commit "
    what += read_json(names[0])["environment"]["commit"][:7]
    head = [
        "",
        "batch",
        "eager: dense",
        "masked",
        "ratio",
        "make_step: dense",
        "masked",
        "ratio",
        "over eager",
        "memory",
    ]
    return [*conditions(read_json(names[1]), what), *markdown(head, rows)]


INFERENCE_TITLES = {
    "best-resnet20-87c5297945.ticket": "ResNet20, p = 0.9", "best-resnet20-56686411e5.ticket": "ResNet20, p = 0.95",
    "best-resnet20-e21621f5ed.ticket": "ResNet20, p = 0.99", "best-vgg11-149020f69d.ticket": "VGG11, p = 0.95",
    "best-vgg11-f5591dd60a.ticket": "VGG11, p = 0.99",
}  # fmt: skip


def inference(record: str) -> Lines:
    """Tickets as machine code beside onnxruntime and torch."""
    found = _rows(record, "inference", "network", "batch", "threads", "runtime")
    runtimes = ("iterand", "iterand-int8", "onnxruntime", "onnxruntime-int8", "torch")
    rows = []
    for name, title in INFERENCE_TITLES.items():
        own = found[name, 1, 1, "iterand"]
        times = [found[name, 1, 1, runtime]["milliseconds"]["median"] for runtime in runtimes]
        ratios = [found[name, batch, 1, one]["speedup"]["median"] for one in runtimes[:2] for batch in (1, 32)]
        additions = f"{own['kept'] / 1e6:.1f} of {own['operations'] / 1e6:.0f}"
        rows.append([title, additions, *(f"{time:.3f}" for time in times), *(f"{ratio:.1f}" for ratio in ratios)])
    what = "Milliseconds of one image on one core, trained tickets, median of 15 rounds in which all take turns; "
    what += "float32 and int8: compiled tickets; onnxruntime and torch: the dense network; "
    what += "speedups over onnxruntime in float32, with one image and with a batch of 32"
    head = ["", "million additions", "float32", "int8", "onnxruntime", "onnxruntime, int8", "torch"]
    head += ["speedup, float32", "float32, batch of 32", "speedup, int8", "int8, batch of 32"]
    return [*conditions(read_json(record), what), *markdown(head, rows)]


def inference_accuracy() -> Lines:
    """All test images through machine code."""
    record = read_json("inference-accuracy.json")
    rows = [
        [
            INFERENCE_TITLES[row["ticket"]], *(f"{row[name]:.2f}" for name in ("torch", "float32", "int8")),
            str(row["float32_other_classes"]), f"{row['float32_difference']:.0e}", str(row["int8_other_classes"]),
        ]
        for row in record["rows"]
    ]  # fmt: skip
    what = f"Test accuracy in % on all {record['rows'][0]['images']:,} test images of CIFAR-10; how many get another "
    what += "class than from torch, and the largest difference of an output, relative to the largest output; int8 with "
    what += f"the ranges of {record['sample']} validation images"
    head = ["", "torch", "float32", "int8", "other class, float32", "difference, float32", "other class, int8"]
    return [*conditions(record, what), *markdown(head, rows)]


def microcontroller() -> Lines:
    """Flash, memory and instructions of exported tickets."""
    record = read_json("microcontroller.json")
    accuracies = {row["ticket"]: row for row in read_json("inference-accuracy.json")["rows"]}
    rows = [
        [
            INFERENCE_TITLES[row["ticket"]], row["activations"], row["weights"], f"`{row['optimize']}`",
            f"{accuracies[row['ticket']][row['activations']]:.2f}", f"{row['flash']:,}", f"{row['memory']:,}",
            f"{row['instructions'] / 1e6:.1f}",
        ]
        for row in record["rows"]
    ]  # fmt: skip
    tools = "; ".join(record["environment"][name] for name in ("arm-none-eabi-gcc", "qemu-system-arm"))
    caption = (
        "*Whole linked programs for a Cortex-M4: bytes of flash (code and data), bytes of memory (variables, with an "
    )
    caption += "input in float32, and stack), million instructions of one image; accuracy in % on the test images of "
    caption += f"CIFAR-10, computed by the same C on a computer; {tools}; `{record['environment']['command']}`.*"
    head = ["", "activations", "weights", "compiled with", "accuracy", "flash", "memory", "million instructions"]
    return [caption, "", *markdown(head, rows)]


def engine_cut() -> Lines:
    """The time of a cut over the number of scores."""
    found = _rows("select-h200.json", "select", "subject", "weights", "way")
    sizes = sorted({weights for subject, weights, _ in found if subject == "one tensor"})
    ways = {"exact": "exact cut", "sort": "`torch.sort`", "exact, far off": "exact cut that left its bracket"}
    rows = [
        [title, *(_number(found["one tensor", weights, way]["milliseconds"]["median"]) for weights in sizes)]
        for way, title in ways.items()
    ]
    head = ["scores", *(f"{weights:,}" for weights in sizes)]
    what = "Milliseconds of a cut of one tensor, median of 15"
    return [*conditions(read_json("select-h200.json"), what), *markdown(head, rows)]


def engine_randomize() -> Lines:
    """The time of a randomization."""
    found = _rows("randomize-h200.json", "randomize", "network", "what")
    titles = {
        "randomize, cut known": "redraw alone (the cut is known)",
        "randomize": "a round: find the cut and redraw",
        "regenerate": "write all weights from their draws",
        "copy": "copy stored weights",
    }
    networks = {"resnet18": "ResNet18", "resnet50": "ResNet50"}
    rows = [
        [title, *(_number(found[network, what]["milliseconds"]["median"]) for network in networks)]
        for what, title in titles.items()
    ]
    head = ["", *networks.values()]
    return [*conditions(read_json("randomize-h200.json"), "Milliseconds, median of 15"), *markdown(head, rows)]


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def engine_convolutions() -> Lines:
    """Narrow convolutions beside cuDNN."""
    three = r"([\d.]+) / +([\d.]+) / +([\d.]+)"
    pattern = rf"^ *(\d+), (\d+), (\d+), (\d+), +(\d+) +{three} +{three}$"
    rows = []
    for found in re.finditer(pattern, read_text("narrow-convolutions-h200.txt"), re.MULTILINE):
        inputs, outputs, kernel, stride, side, *times = found.groups()
        shape = f"{inputs} → {outputs}, {kernel} × {kernel}{f' / {stride}' if stride != '1' else ''}, {side}"
        rows.append([shape, *(f"{theirs} → {ours}" for theirs, ours in zip(times[:3], times[3:]))])
    text = "*Microseconds, cuDNN → ours, batch 128, bfloat16, in a CUDA graph; NVIDIA H200, torch "
    text += "2.11.0+cu130, commit 1e10432; "
    text += "`python tools/convolution.py`.*"
    head = ["inputs → outputs, kernel / stride, side", "forward", "gradient of images", "gradient of weights"]
    return [text, "", *markdown(head, rows)]


def engine_norms() -> Lines:
    """Fused norms beside torch's."""
    pattern = r"^c (\d+) side (\d+) add (\w+): torch fwd [\d.]+ both ([\d.]+) us; ours fwd [\d.]+ both ([\d.]+) us"
    times: dict[tuple[str, str], dict[str, str]] = {}
    for found in re.finditer(pattern, read_text("norms-h200.txt"), re.MULTILINE):
        channels, side, added, theirs, ours = found.groups()
        times.setdefault((channels, side), {})[added] = f"{theirs} → {ours}"
    rows = [[f"{c}, {side} × {side}", entry["False"], entry["True"]] for (c, side), entry in times.items()]
    text = "*Microseconds of a batch norm with its ReLU, forward and backward, torch → ours, batch 128, "
    text += "bfloat16, in a CUDA "
    text += "graph; NVIDIA H200, torch 2.11.0+cu130, commit 9d71b9a.*"
    return [text, "", *markdown(["channels, side", "norm and ReLU", "with a residual sum in between"], rows)]


def engine_side_by_side() -> Lines:
    """Several runs on one GPU."""
    pattern = r"^(\w+): x(\d+): (\d+) steps/s"
    before, after = read_text("side-by-side-h200.txt").split("commit 1e10432", 1)
    found = {(name, int(count)): steps for name, count, steps in re.findall(pattern, before, re.MULTILINE)}
    found |= {("ours", int(count)): steps for _, count, steps in re.findall(pattern, after, re.MULTILINE)}
    titles = {"resnet20": "ResNet20, cuDNN", "ours": "ResNet20, ours", "conv6": "Conv6", "vgg11": "VGG11"}
    rows = [
        [str(count), *(f"{int(found[name, count]):,}" if (name, count) in found else "" for name in titles)]
        for count in (1, 2, 4, 8)
    ]
    text = "*Steps a second of all processes together under NVIDIA's MPS, IteRand, batch 128, bfloat16, "
    text += "two seconds each; NVIDIA "
    text += "H200, torch 2.11.0+cu130, commits e118aa0 and (ours) 1e10432.*"
    return [text, "", *markdown(["processes", *titles.values()], rows, left=0)]


def engine_runs() -> Lines:
    """Where the seconds of a whole run go."""
    pattern = r"^iterand train (\w+) .*\n(folder .*)$"
    own = read_text("whole-runs-h200.txt").split("Commit 752531a")[0]
    titles = {"resnet18": "ResNet18", "conv6": "Conv6 (KU)"}
    rows = []
    for network, line in re.findall(pattern, own, re.MULTILINE):
        at = {name: float(seconds) for name, seconds in re.findall(r"(folder|epoch \d+|record|end) +([\d.]+)", line)}
        parts = at["folder"], at["epoch 1"] - at["folder"], at["epoch 100"] - at["epoch 1"], at["end"] - at["epoch 100"]
        rows.append([titles[network], *(f"{seconds:.1f}" for seconds in (*parts, at["end"]))])
    text = "*Seconds of `iterand train resnet18` and `conv6` with 100 epochs, alone on the machine, "
    text += "Triton's cache empty; NVIDIA "
    text += "H200, torch 2.11.0+cu130, Triton 3.6.0, commit 3a7598a (n = 1).*"
    head = ["", "start", "until the first epoch is done", "99 epochs", "test, ticket, end", "all"]
    return [text, "", *markdown(head, rows)]


def ticket_sizes() -> Lines:
    """Tickets of whole networks beside their entropy."""
    titles = {"conv6": ("Conv6", 0.5), "resnet18_cifar": ("ResNet18", 0.6), "resnet50_imagenet": ("ResNet50", 0.7)}
    rows = []
    for entry in read_json("ticket.json")["sizes"]:
        if entry["width_factor"] != 1:
            continue
        title, share = titles[entry["network"]]
        rows.append([
            f"{title}, p = {share:g} ({entry['weights'] / 1e6:.2f}M weights)", f"{entry['float32_bytes'] / 1e6:.1f} MB",
            f"{entry['entropy_bound_bytes'] / 1e6:.3f} MB", f"**{entry['ticket_bytes'] / 1e6:.3f} MB**",
            f"{entry['over_bound_percent']:.2f} %", f"{entry['bits_a_weight']:.2f}",
        ])  # fmt: skip
    text = "*Random networks of these shapes, `signed_constant`; `python tools/ticket.py`.*"
    head = ["network", "float32", "bound", "ticket", "above the bound", "bits per weight"]
    return [text, "", *markdown(head, rows)]


def ticket_storage() -> Lines:
    """A ticket beside other ways to store the same weights."""
    kinds = ("float32_bytes", "float16_bytes", "zstd_float32_bytes", "ticket_bytes", "entropy_bound_bytes")
    rows = []
    for entry in read_json("ticket.json")["table"]:
        sizes = [f"{entry[kind] / 1e6:.{2 if number < 2 else 3}f}" for number, kind in enumerate(kinds)]
        sizes[3] = f"**{sizes[3]}**"
        rows.append([f"{entry['sparsity']:g}", *sizes])
    text = "*Conv6, `signed_constant`, in MB, over the sparsity p; `python tools/ticket.py`.*"
    head = ["p", "float32", "float16", "float32, zstd -19", "ticket", "bound"]
    return [text, "", *markdown(head, rows, left=0)]


_IMAGES = {"as it is": "224×224"}
_BY = {"a bare loop": "one loop"}


def pipeline() -> Lines:
    """Decoding images on two cores."""
    record = read_json("pipeline.json")
    rows = [
        [_IMAGES.get(row["images"], row["images"]), row["from"], _BY.get(row["by"], row["by"]),
         f"{row['images_per_second']:,.0f}", f"{row['images_per_second_of_one_processor']:,.0f}",
         f"{row['own_microseconds_per_image']:,.0f}"]
        for row in record["pipeline"]
    ]  # fmt: skip
    hardware = record["hardware"]
    text = f"*Best of 4 rounds of 0.4 s, batches of {record['batch_size']}; {hardware['cores']} cores of "
    text += f"{hardware['cpu']}; `{_as_tool(record['command'])}`.*"
    head = ["images", "from", "by", "images/s", "images per CPU second", "main process, µs per image"]
    return [text, "", *markdown(head, rows, left=3)]


def pipeline_16_cores() -> Lines:
    """The same over the number of processes."""
    record = read_json("pipeline-16-cores.json")
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in record["pipeline"]:
        place = _IMAGES.get(row["images"], row["images"]), row["from"]
        found.setdefault(place, {})[row["by"]] = f"{row['images_per_second']:,.0f}"
    ways = list(dict.fromkeys(row["by"] for row in record["pipeline"]))
    rows = [[*place, *(speeds.get(way, "–") for way in ways)] for place, speeds in found.items()]
    hardware = record["hardware"]
    text = f"*Images per second, synthetic images, one run; {hardware['cores']} cores of {hardware['cpu']}, of which "
    text += f"other programs used up to 10, and {hardware['gpu']}; `{_as_tool(record['command'])}`.*"
    return [text, "", *markdown(["images", "from", *(_BY.get(way, way) for way in ways)], rows, left=2)]


def _as_tool(command: str) -> str:
    """A command of a record whose program has moved."""
    return command.replace("python benchmarks/", "python tools/")


def scaling_costs() -> Lines:
    """The cost model for the paper's networks on ImageNet."""
    record = read_json("scaling.json")
    text = f"*Cost model for IteRand (SC), bfloat16; the step of one {record['gpu']} is measured, links are assumed; "
    text += "`python tools/scaling.py table`.*"
    return [text, "", *scaling.table(record).splitlines()]


def scaling_billion() -> Lines:
    """What a billion weights would cost, scaled linearly from what was measured."""
    host = read_json("scaling-host.json")
    count = host["weights"]
    held, saved = host["held_bytes_a_weight"], host["checkpoint_bytes_a_weight"]

    def both(unit: str, of_one: float, digits: str = ".2f") -> list[str]:
        return [f"{of_one * number:{digits}} {unit}" for number in (count, 10**9)]

    def size(of_one: float) -> list[str]:
        return [f"{of_one * number / 1e9:.3g} GB" for number in (count, 10**9)]

    rows = [
        ["held by a rank", *size(held)],
        ["checkpoint, size", *size(saved)],
        ["checkpoint, time", *both("s", host["checkpoint_seconds"] / count, ".3g")],
        ["checkpoint, host memory of rank 0 beside", *size(host["checkpoint_more_memory_bytes_a_weight"])],
        ["gradients sent in a step (many ranks)", *size(8)],
        ["ranking over the network without Triton", *size(32)],
        ["drawing weights and scores on a CPU, once a start", *both("s", host["drawing_seconds"] / count, ".3g")],
        ["comparing digests on a CPU, once an epoch", *both("s", host["comparing_seconds"] / count, ".3g")],
    ]
    head = ["", f"{count / 1e6:.1f} M weights", "10⁹ weights"]
    hardware = host["environment"]["hardware"]
    text = (
        f"*Measured with {count / 1e6:.1f} M weights (n = 1), scaled linearly to 10⁹; one core of {hardware['cpu']}; "
    )
    text += "`python tools/scaling.py measure results/records/benchmarks/scaling-host.json`.*"
    return [text, "", *markdown(head, rows)]


def theory_failure() -> Lines:
    """Failure of one half over R: claimed, exact, simulated."""
    record = read_json("theory-simulate.json")
    notes = {77: " (the paper's R for δ = 0.05)", 174: " (the repaired R)"}
    rows = [
        [f"{row['rounds']}{notes.get(row['rounds'], '')}", f"{row['paper_half']:.3g}", f"{row['exact_half']:.3g}",
         _interval(row["simulated_half"])]
        for row in record["rows"] if row["rounds"] in (1, 4, 16, 64, *notes)
    ]  # fmt: skip
    text = f"*Probability that one half fails, ε = {record['epsilon']:g}, w = {record['weight']:g}, width 2; "
    text += f"{record['trials']:,} trials, 99 % Clopper-Pearson intervals; `iterand theory simulate`.*"
    return [text, "", *markdown(["R", "paper's bound", "exact", "simulated"], rows)]


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3g} [{estimate['low']:.3g}, {estimate['high']:.3g}]"


def theory_limit() -> Lines:
    """Where Proposition 4.3 is false."""
    record = read_json("theory-limit.json")
    rows = []
    for row in record["rows"]:
        simulated = row["simulated"]
        false = row["at_least"] > row["delta"] or (simulated is not None and simulated["low"] > row["delta"])
        estimate = _interval(simulated) if simulated else ""
        verdict = "false" if false else "holds, though its proof does not"
        rows.append([f"{row['delta']:g}", str(row["rounds"]), f"{row['at_least']:.3g}", estimate, verdict])
    text = f"*Failure at width 2 for f(x) = x with the paper's R, ε = {record['epsilon']:g}; simulated with the best "
    text += "draws and masks: 20,000 trials, 99 % Clopper-Pearson intervals; `iterand theory simulate --rounds R`.*"
    head = ["δ", "R of Proposition 4.3", "failure at least", "simulated", "Proposition 4.3"]
    return [text, "", *markdown(head, rows)]


def theory_width() -> Lines:
    """The width that is enough over R."""
    record = read_json("theory-width.json")
    rows = [row for row in record["rows"] if row["rounds"] in (1, 4, 16, 32, 64, 77, 128, 174)]
    lines = [
        ["paper", *(f"{row['paper'][0]:,}" for row in rows)],
        ["repaired", *(f"{row['repaired'][0]:,}" for row in rows)],
        ["simulated", *(f"{row['simulated']:,}" for row in rows)],
    ]
    text = f"*Hidden width that is enough for f(x) = x, ε = {record['epsilon']:g}, δ = {record['delta']:g}; "
    text += "simulated: enough in "
    text += "95 % of 1,000 trials; `iterand theory width`.*"
    return [text, "", *markdown(["R", *(str(row["rounds"]) for row in rows)], lines)]


def theory_best() -> Lines:
    """The construction beside the best choice of draws and masks."""
    record = read_json("theory-simulate.json")
    rows = [
        [f"{row['width']}, {row['rounds']}", f"{row['best']:.3f}", f"{row['construction']:.3f}"]
        for row in record["exhaustive"]
    ]
    text = "*Median error for f(x) = x, 200 trials; `iterand theory simulate`.*"
    return [text, "", *markdown(["width, R", "best draws and masks", "construction"], rows)]


def theory_construct() -> Lines:
    """The network of the theorem, built and certified."""
    record = read_json("theory-construct.json")
    trials = record["trials"]
    accuracies = {f"{100 * record[key]:.2f} %" for key in ("lowest_accuracy", "highest_accuracy")}
    rows = [
        ["proven error within ε", f"{record['within_epsilon']} of {trials}"],
        ["event held", f"{record['event_held']} of {trials}"],
        ["exact probability that the event fails", f"{record['exact_failure']:.2g}"],
        ["largest error found, in any trial", f"{record['largest_measured']:.4f}"],
        ["largest error proven, in any trial", f"{record['largest_proven']:.4f}"],
        ["accuracy of the target", f"{100 * record['target_accuracy']:.2f} %"],
        ["accuracy of the constructions", " to ".join(sorted(accuracies))],
        [
            "test images whose class the proven error could change",
            f"at most {100 * record['largest_unprotected']:.2f} %",
        ],
    ]
    text = f"*{trials} seeds, ε = 0.1, δ = 0.05, R = {record['rounds']:,}, 360 test images; one core of a CPU; "
    text += f"`{record['command']}`.*"
    return [text, "", *markdown(["", ""], rows)]


def theory_signed_width() -> Lines:
    """The width of signed constants over R."""
    record = read_json("theory-signed-width.json")
    lines = [
        ["Theorem D", *(f"{row['bound'][0]:,}" for row in record["rows"])],
        ["exact", *(f"{row['exact']:,}" for row in record["rows"])],
        ["simulated", *(f"{row['simulated']:,}" for row in record["rows"])],
    ]
    text = f"*Signed constants, two layers: hidden width that is enough for f(x) = x, ε = {record['epsilon']:g}, "
    text += f"δ = {record['delta']:g}, m = {record['units']}; simulated: enough in 95 % of 1,000 trials; "
    text += f"`iterand theory width --weights signed_constant --epsilon {record['epsilon']:g}`.*"
    return [text, "", *markdown(["R", *(str(row["rounds"]) for row in record["rows"])], lines)]


def theory_signed_failure() -> Lines:
    """The failure of signed constants over R, at the least width and at twice that."""
    record = read_json("theory-signed-simulate.json")
    rows = [
        [str(row["rounds"]), f"{row['narrow']:.3g}", _interval(row["narrow_simulated"]), f"{row['wide']:.3g}",
         _interval(row["wide_simulated"])]
        for row in record["rows"]
    ]  # fmt: skip
    text = "*Signed constants, two layers: probability that no draws and masks are within ε, "
    text += f"ε = {record['epsilon']:g}, w = {record['weight']:g}; {record['trials']:,} trials, 99 % Clopper-Pearson "
    text += "intervals; `iterand theory simulate --weights signed_constant`.*"
    head = (f"{kind}, width {width}" for width in record["widths"] for kind in ("exact", "simulated"))
    return [text, "", *markdown(["R", *head], rows)]


def theory_signed_depth() -> Lines:
    """The width of signed constants over depth."""
    record = read_json("theory-signed-depth.json")
    rows = [
        [str(row["layers"]), str(row["base"]), f"{row['redrawn']:,}", str(row["rounds"]), f"{row['single']:,}",
         f"{row['failure']:.3g}", _interval(row["simulated"]), f"{row['necessary']:,}"]
        for row in record["depths"]
    ]  # fmt: skip
    text = (
        f"*Signed constants: hidden width of L layers for f(x) = w·x and all \\|w\\| ≤ 1, ε = {record['epsilon']:g}, "
    )
    text += f"δ = {record['delta']:g}, m = {record['units']}; simulated: 1,000 trials, 99 % Clopper-Pearson intervals; "
    text += f"`iterand theory width --weights signed_constant --epsilon {record['epsilon']:g} --rounds 1`.*"
    head = ["L", "base h", "all signs drawn", "R for that", "without redraws", "its failure", "simulated", "necessary"]
    return [text, "", *markdown(head, rows)]


def theory_signed_slopes() -> Lines:
    """The best networks of signed constants, by exhaustive search."""
    rows = [
        [", ".join(map(str, row["widths"])), str(row["best"]), str(row["digits"]), str(row["bound"])]
        for row in read_json("theory-signed-simulate.json")["exhaustive"]
    ]
    text = "*Largest M such that some signs and masks give each of the slopes 0, s, …, M·s; exhaustive search over all "
    text += "weights from {−1, 0, 1}; `iterand theory simulate --weights signed_constant`.*"
    return [text, "", *markdown(["hidden widths", "best possible", "Theorem E", "Proposition F"], rows)]


def theory_signed_construct() -> Lines:
    """A trained network found in random networks of signed constants."""
    records = [read_json(f"theory-signed-construct{end}.json") for end in ("-1", "")]
    rows = [
        ["hidden widths", *(" and ".join(f"{width:,}" for width in record["hidden_widths"]) for record in records)],
        ["seeds", *(str(record["trials"]) for record in records)],
        ["proven error within ε", *(f"{record['within_epsilon']} of {record['trials']}" for record in records)],
        ["exact probability that a unit is missing", *(f"{record['exact_failure']:.2g}" for record in records)],
        ["largest error found", *(f"{record['largest_measured']:.4f}" for record in records)],
        ["largest error proven", *(f"{record['largest_proven']:.4f}" for record in records)],
        ["accuracy of the target", *(f"{100 * record['target_accuracy']:.2f} %" for record in records)],
        ["lowest accuracy of a construction", *(f"{100 * record['lowest_accuracy']:.2f} %" for record in records)],
    ]
    text = (
        "*A network 64-12-10 trained on digits, found in random ±c networks, ε = 0.1, δ = 0.05, 360 test images; one "
    )
    text += "core of a CPU; `iterand theory construct --weights signed_constant --rounds R`.*"
    return [text, "", *markdown(["", *(f"R = {record['rounds']}" for record in records)], rows)]


def network_weights() -> Lines:
    """How many weights each network has."""
    names = (
        "conv6", "resnet18_cifar", "resnet34_cifar", "resnet18_imagenet", "resnet34_imagenet", "resnet50_imagenet",
        "resnet101_imagenet", "wide_resnet50_2", "resnet20", "vgg11", "digits_conv",
    )  # fmt: skip
    wide = ("resnet50_imagenet", 2.0)
    rows = []
    for name, width in [*((name, 1.0) for name in names), wide]:
        model = network_outline(name, width_factor=width)
        counts = [
            sum(module.weight.numel() for module in model.modules() if isinstance(module, kind))
            for kind in (nn.Conv2d, nn.Linear)
        ]
        title = f"`{name}`" + (f", ρ = {width:g}" if width != 1 else "")
        rows.append([title, *(f"{count:,}" for count in (*counts, sum(counts)))])
    for name in ("lstm", "bilstm"):
        model = network_outline(name)
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
        rows.append([f"`{name}`, with the embedding", "", "", f"{count:,}"])
    text = "*Weights at ρ = 1, counted by building the networks.*"
    return [text, "", *markdown(["network", "convolutions", "linear", "both"], rows)]


def fine_tuning_runs(benchmark: str) -> dict[str, list[Mapping[str, Any]]]:
    """The records of ``fine_tuning.py`` or ``fine_tuning_images.py`` by method, the smallest files first.

    Of the learning rates that were tried, the one with the best validation accuracy at seed 0.
    """
    paths = sorted(BENCHMARKS.glob("*.json"))
    found = [record for record in (json.loads(path.read_text(encoding="utf-8")) for path in paths)
             if record.get("benchmark") == benchmark]  # fmt: skip
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(found, key=lambda record: record["bytes"]):
        settings = record["settings"]
        method = settings["method"]
        label = {
            "probe": "only a linear head", "full": "all weights", "bitfit": "biases (BitFit)", "norms": "norms",
            "lora": f"LoRA, rank {settings['rank']}", "mask": f"mask, p = {settings['sparsity']:g}",
        }[method]  # fmt: skip
        groups.setdefault(label, []).append(record)
    for label, records in groups.items():
        tried = [record for record in records if record["settings"]["seed"] == 0]
        best = max(tried, key=lambda record: record["validation_accuracy"])["settings"]["lr"]
        groups[label] = [record for record in records if record["settings"]["lr"] == best]
    return groups


def fine_tuning(benchmark: str, what: str) -> Lines:
    """Masks beside other ways of fine-tuning."""
    groups = fine_tuning_runs(benchmark)
    rows, counts = [], set()
    for label, records in groups.items():
        accuracies = [record["test_accuracy"] for record in records]
        spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        times = [statistics.median(record[key] for record in records if key in record) if key in records[0] else None
                 for key in ("switch_ms", "switch_cached_ms")]  # fmt: skip
        rows.append([
            label, f"{statistics.mean(accuracies):.2f}{spread}", size(statistics.mean(r["bytes"] for r in records)),
            f"{records[0]['settings']['lr']:g}",
            *("" if one is None else f"{one:.2f}" for one in times),
        ])  # fmt: skip
        counts.add(len(records))
    environment = next(iter(groups.values()))[0]["environment"] if groups else {}
    span = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    many = f"mean ± standard deviation, n = {span}"
    caption = f"*{what}; {many}; {machine(environment)}, torch "
    caption += f"{environment.get('torch')}; switching on one core of a CPU.*"
    head = ["", "test accuracy (%)", "file", "learning rate", "switch (ms)", "switch, cached (ms)"]
    return [caption, "", *markdown(head, rows)]


def task_switch() -> Lines:
    """Switching between tasks of MiniLM, beside a copy of the weights that they mask."""
    record = read_json("task-switch-cpu.json")
    columns = ("first", "again", "cached", "copy")
    rows = []
    for row in record["benchmarks"]["tasks"]["rows"]:
        times = [row[f"{column}_milliseconds"] for column in columns]
        cells = [f"{one['median']:.2f} ({one['p10']:.2f}–{one['p90']:.2f})" for one in times]
        rows.append(
            [f"{row['sparsity']:g}", size(row["ticket_bytes"]), *cells, f"{row['ratio_to_copy']['median']:.2f}"]
        )
    what = (
        "Milliseconds to switch between ten tasks of MiniLM on one core of a CPU, median (10th–90th percentile): the "
    )
    what += "first time, again with one cached task, and cached; copy: the 10.6 million masked weights alone; ratio: "
    what += "again ÷ copy"
    head = ["p", "ticket", "first", "again", "cached", "copy", "ratio"]
    return [*conditions(record, what), *markdown(head, rows)]


TABLES: dict[str, Callable[[], Lines]] = {
    "task-switch": task_switch,
    "fine-tuning": lambda: fine_tuning("fine-tuning", "MiniLM (22 million parameters) on the film reviews of IMDB"),
    "fine-tuning-images": lambda: fine_tuning("fine-tuning-images", "ResNet18 of CIFAR-10 on a small folder of images"),
    "benchmarks": benchmarks,
    "engine-step": engine_step,
    "engine-loop": engine_loop,
    "inference": lambda: inference("inference-cpu.json"),
    "inference-arm": lambda: inference("inference-arm.json"),
    "inference-accuracy": inference_accuracy,
    "microcontroller": microcontroller,
    "engine-cut": engine_cut,
    "engine-randomize": engine_randomize,
    "engine-convolutions": engine_convolutions,
    "engine-norms": engine_norms,
    "engine-side-by-side": engine_side_by_side,
    "engine-runs": engine_runs,
    "ticket-sizes": ticket_sizes,
    "ticket-storage": ticket_storage,
    "pipeline": pipeline,
    "pipeline-16-cores": pipeline_16_cores,
    "scaling": scaling_costs,
    "scaling-billion": scaling_billion,
    "theory-failure": theory_failure,
    "theory-limit": theory_limit,
    "theory-width": theory_width,
    "theory-best": theory_best,
    "theory-construct": theory_construct,
    "theory-signed-width": theory_signed_width,
    "theory-signed-failure": theory_signed_failure,
    "theory-signed-depth": theory_signed_depth,
    "theory-signed-slopes": theory_signed_slopes,
    "theory-signed-construct": theory_signed_construct,
    "network-weights": network_weights,
}
