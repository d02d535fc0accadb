"""Run the native checks on an emulated processor with AMX: Debian's Linux in Bochs.

    git clone https://github.com/bochs-emu/Bochs && git -C Bochs checkout 783b58fd6
    python scripts/amx_in_bochs.py Bochs/bochs work

bochs_amx.patch adds XFD, by which Linux grants tiles (Intel's manual, volume 1, 13.14), and mends six defects: saved
tiles have rows and columns exchanged, half of their rows, and none in use; vcvtne2ps2bf16 reads beyond its operand;
signed bytes are multiplied as unsigned ones.

Needs Debian 12 with the packages g++, busybox-static, isolinux, syslinux-common, genisoimage and cpio, and 15 minutes.
Prints the result of each check; with --write, puts the instructions of each matmul, by tiles and by AVX-512, into
research/tables.md. The hash of all results must be that of the tiles' twin, which runs here.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pages import fill, table

from gearbx_mlx.kernels.compiler import AMX, AMX_TWIN, AVX512, DEFINED, INSTRUCTION_SETS, SOURCES

ROOT = Path(__file__).parents[1]
CHECKS = sorted((ROOT / "tests" / "kernels" / "native").glob("check_*.c*"))
PASSES = [check for check in CHECKS if check.stem == "check_passes"]
SHOWN = 1, 2, 5, 8, 16  # vectors
KERNEL = "linux-image-6.12-cloud-amd64"
FEATURES = "x86-64", "avx", "evex", "amx"
WINDOWS = "x", "x11", "wx", "sdl2"
CONFIGURE = [
    *(f"--enable-{name}" for name in FEATURES),
    *(f"--without-{name}" for name in WINDOWS),
    *("--with-nogui", "--disable-plugins", "--disable-docbook"),
]
BOOT = "console=ttyS0 mitigations=off nokaslr tsc=reliable lpj=1000000 intel_idle.max_cstate=0 quiet"
MACHINE = """megs: 1024
romimage: file={bios}/BIOS-bochs-latest
vgaromimage: file={bios}/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
cpu: model=sapphire_rapids, count=1, ips=100000000
ata0-master: type=cdrom, path={work}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={work}/serial.txt
display_library: nogui
log: {work}/bochs.log
"""
INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
exec > /dev/ttyS0 2>&1
export GEARBX_THREADS=2
for check in /checks/*; do echo "== ${check##*/}"; $check; done
export GEARBX_THREADS=1
echo "== steps by tiles"; /checks/check_passes steps
echo "== steps by AVX-512"; /avx512 steps
echo "== end"
/bin/busybox sleep 1
/bin/busybox poweroff -f
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([*map(str, command)], check=True, cwd=cwd)


def built(folder: Path, flags: Sequence[str], checks: Sequence[Path]) -> None:
    """Compile and link checks with these flags, without shared libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    common = ["-O2", "-ffp-contract=off", "-fno-strict-aliasing", *flags, f"-I{SOURCES}", "-c"]
    objects = []
    for source in (*SOURCES.glob("*.cpp"), *checks):
        if not source.stem.endswith("primitive"):
            language = ["-xc", "-std=c11"] if source.suffix == ".c" else ["-std=c++20"]
            run("g++", *common, *language, source, "-o", folder / f"{source.stem}.o")
            objects += [folder / f"{source.stem}.o"] if source not in checks else []
    for check in checks:
        run("g++", "-static", "-pthread", folder / f"{check.stem}.o", *objects, "-o", folder / check.stem)


def emulator(source: Path, work: Path) -> Path:
    """Return the patched emulator, built in `work`."""
    folder = work / "bochs"
    if not (folder / "bochs").exists():
        shutil.copytree(source, folder, dirs_exist_ok=True)
        run("patch", "-p1", "-N", "-i", Path(__file__).with_name("bochs_amx.patch").resolve(), cwd=folder)
        run("./configure", *CONFIGURE, cwd=folder)
        run("make", f"-j{os.cpu_count()}", cwd=folder)
    return folder / "bochs"


def disk(work: Path) -> None:
    """Write a bootable disk with Linux, busybox and the checks."""
    root, image = work / "root", work / "iso"
    for folder in (root / "bin", root / "proc", root / "dev", root / "checks", image / "isolinux"):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy("/bin/busybox", root / "bin")
    for check in CHECKS:
        shutil.copy(work / "amx" / check.stem, root / "checks")
    shutil.copy(work / "avx512" / PASSES[0].stem, root / "avx512")
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    depends = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=True).stdout
    package = re.search(r"Depends: (linux-image-\S+)", depends)
    if package is None:
        raise SystemExit(f"{KERNEL}: no such package; run this on Debian 12")
    run("apt-get", "download", "-qq", package[1], cwd=work)
    run("dpkg-deb", "-x", next(work.glob("linux-image-*.deb")), work / "kernel")
    shutil.copy(next((work / "kernel" / "boot").glob("vmlinuz-*")), image / "vmlinuz")
    run("sh", "-c", f"find . | cpio -o -H newc --quiet | gzip > {image.resolve()}/initrd", cwd=root)
    for file in ("/usr/lib/ISOLINUX/isolinux.bin", "/usr/lib/syslinux/modules/bios/ldlinux.c32"):
        shutil.copy(file, image / "isolinux")
    menu = f"DEFAULT linux\nLABEL linux\n KERNEL /vmlinuz\n APPEND initrd=/initrd {BOOT}\n"
    (image / "isolinux" / "isolinux.cfg").write_text(menu)
    files = ("-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-o", work / "boot.iso")
    run("genisoimage", "-quiet", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", *files, image)


def hash_in(text: str) -> str:
    found = re.search(r"results (\w+)", text)
    return found[1] if found else "none"


def steps_table(output: str) -> str:
    """Return the thousands of instructions per matmul, by the number of vectors."""
    rows = []
    for name, part in re.findall(r"^== steps by (.+)$((?:\n[^=].*)*)", output, re.MULTILINE):
        steps: dict[str, dict[int, int]] = {}
        for layout, vectors, count in re.findall(r"^(.+), (\d+) vectors: (\d+) steps$", part, re.MULTILINE):
            steps.setdefault(layout, {})[int(vectors)] = int(count)
        rows += [[layout, name, *(f"{of[n] / 1000:.0f}" for n in SHOWN)] for layout, of in steps.items()]
    rows.sort(key=lambda row: row[0])  # keeps the order of the runs
    return table(["weights", "by", *SHOWN], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Bochs, at the commit that the patch fits")
    parser.add_argument("work", type=Path, help="folder for everything that is made")
    parser.add_argument("--write", action="store_true", help="write the table of instructions into research/tables.md")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    bochs = emulator(args.source, work)
    built(work / "amx", INSTRUCTION_SETS[AMX].flags, CHECKS)
    built(work / "avx512", INSTRUCTION_SETS[AVX512].flags, PASSES)
    built(work / "twin", [*INSTRUCTION_SETS[AVX512].flags, *DEFINED[AMX_TWIN]], PASSES)
    disk(work)
    (work / "bochsrc").write_text(MACHINE.format(bios=bochs.parent / "bios", work=work))
    (work / "serial.txt").unlink(missing_ok=True)
    subprocess.run([str(bochs), "-q", "-f", str(work / "bochsrc")], cwd=work, stdout=subprocess.DEVNULL)
    output = (work / "serial.txt").read_text(errors="replace").replace("\r", "")
    of_twin = subprocess.run([str(work / "twin" / PASSES[0].stem)], capture_output=True, text=True).stdout
    print(output[output.index("== ") :])
    print(f"hash of the twin: {hash_in(of_twin)}")
    if args.write:
        fill(ROOT / "research" / "tables.md", {"amx_steps": lambda: steps_table(output)})
    passed = output.count(", 0 wrong") == len(CHECKS) + 2
    sys.exit(not passed or hash_in(output) != hash_in(of_twin))


if __name__ == "__main__":
    main()
