"""A pipeline of products, as text: small enough that what late passes make of it can be counted by hand."""

from __future__ import annotations

from collections.abc import Sequence


def toy_text(stages: int, skip: bool = False, trains: bool = True, devices: Sequence[int] = ()) -> str:
    """Return a chain of `stages` products h(i) = h(i-1) * w(i), h(-1) = x.

    With `skip`, h(0) is also added before the last stage. Each stage lies on one device, or on as many as `devices`
    says.
    """
    last, skip = stages - 1, skip and stages > 2
    lines = [f"module @toy facts({'differentiated, ' if trains else ''}staged) {{"]
    several = {i: count for i, count in enumerate(devices) if count > 1}
    lines += [
        f"  mesh @s{i} (dp={count}) {' '.join(f'cpu:{i}.{j}' for j in range(count))}" for i, count in several.items()
    ]
    lines += [f"  stage {i} on {f's{i}' if i in several else f'cpu:{i}'}" for i in range(stages)]
    lines += ["  input %x : f32[4]", f"  output %h{last}"]
    for i in range(stages):
        lines.append(f"  var @w{i} : f32[4] stage {i} param")
        if trains:
            lines.append(f"  var @w{i}.grad : f32[4] stage {i} grad init zeros")
    for i in range(stages):
        operands = ["x" if i == 0 else f"h{i - 1}"] + (["h0"] if skip and i == last else [])
        lines.append(f"  graph @s{i}.F({', '.join(f'%{n} : f32[4]' for n in operands)}) {{")
        source = operands[0]
        if len(operands) > 1:
            lines.append(f"    %t{i} : f32[4] = add(%{operands[0]}, %h0)")
            source = f"t{i}"
        lines += [f"    %w : f32[4] = read(@w{i})", f"    %h{i} : f32[4] = mul(%{source}, %w)"]
        lines += ([f"    save %{source}"] if trains else []) + [f"    return %h{i}", "  }"]
        if not trains:
            continue
        arguments = [source] + ([] if i == last else [f"h{i}.grad"]) + (["h0.skip.grad"] if skip and i == 0 else [])
        lines.append(f"  graph @s{i}.B({', '.join(f'%{n} : f32[4]' for n in arguments)}) {{")
        grad = f"h{i}.grad"
        if i == last:
            lines.append(f"    %{grad} : f32[4] = const(value=1.0, shape=[4], dtype=f32)")
        elif len(arguments) > 2:
            lines.append(f"    %sum.grad : f32[4] = add(%{grad}, %h0.skip.grad)")
            grad = "sum.grad"
        lines += [
            f"    %w : f32[4] = read(@w{i})",
            f"    %dw{i} : f32[4] = mul(%{source}, %{grad})",
            f"    accum(%dw{i}, @w{i}.grad)",
        ]
        results = [] if i == 0 else [f"h{i - 1}.grad"]
        lines += [f"    %{n} : f32[4] = mul(%{grad}, %w)" for n in results]
        if skip and i == last:
            lines.append(f"    %h0.skip.grad : f32[4] = mul(%{grad}, %w)")
            results.append("h0.skip.grad")
        lines += ["    return" + (" " + ", ".join("%" + n for n in results) if results else ""), "  }"]
        lines += [f"  graph @s{i}.U() {{", f"    %w : f32[4] = read(@w{i})", f"    %g : f32[4] = take(@w{i}.grad)"]
        lines += ["    %lr : f32[] = const(value=0.1, shape=[], dtype=f32)", "    %w1 : f32[4] = sgd(%w, %g, %lr)"]
        lines += [f"    write(%w1, @w{i})", "    return", "  }"]
    return "\n".join([*lines, "}"]) + "\n"
