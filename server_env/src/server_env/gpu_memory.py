"""How much GPU memory is in use, as the driver sees it."""

import asyncio
import os
import shutil


async def used_bytes() -> int:
    """Bytes in use on the GPUs that this process may see, by anybody; 0 on a machine without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    process = await asyncio.create_subprocess_exec(
        program,
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        *([f"--id={visible}"] if visible else []),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await process.communicate()
    return sum(int(word) for word in out.decode().split() if word.isdecimal()) << 20
