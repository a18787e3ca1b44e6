//! The namespaces that a bed lives in, and the guard that ends it.
//!
//! A bed runs in a process, a mount and (with a node) a network namespace of its own, so the kernel itself removes
//! its processes, mounts, bridges and firewall rules. A guard script watches a pipe from us: when we end, however we
//! end, it ends the namespaces and removes what is left, which is the bed's folder and its cgroups.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::parts::Cache;
use crate::process::run;
use crate::wait;

/// $1: the bed's folder; $2: its name, which is also the name of its cgroups; then flags of `unshare`.
const GUARD: &str = r#"
dir=$1 bed=$2; shift 2
trap '' INT HUP
trap 'exit 0' TERM
clean() {
  read -r init < "$dir/init.pid"
  kill -9 $ns $init 2>/dev/null; wait $ns 2>/dev/null
  # The first process of the namespace becomes a zombie when all others are gone.
  for try in {1..100}; do
    read -r pid name state rest < "/proc/$init/stat" && [ "$state" != Z ] || break
    sleep 0.05
  done 2>/dev/null
  for try in 1 2 3 4 5 6 7 8 9 10; do
    find /sys/fs/cgroup -depth -type d -path "*/$bed*" -exec rmdir {} + 2>/dev/null
    find /sys/fs/cgroup -type d -name "$bed" 2>/dev/null | grep -q . || break
    sleep 0.2
  done
  rm -rf "$dir"
}
trap clean EXIT
setpriv --pdeathsig KILL unshare --pid --fork --kill-child --mount "$@" bash -c '
  read -r pid rest < /proc/self/stat
  mount -t proc proc /proc && mount --make-rshared / && { ip link set lo up || true; }
  echo $pid > "$0/init.tmp" && mv "$0/init.tmp" "$0/init.pid"
  trap : INT TERM HUP
  while :; do sleep 3600 & wait $!; done' "$dir" &
ns=$!
keep=
while read -r line; do keep=$line; done
[ "$keep" = keep ] && wait $ns
"#;

/// Namespaces, a folder and the guard of one bed. Everything in them ends when this is dropped.
#[derive(Debug)]
pub struct Sandbox {
    dir: PathBuf,
    init: i32,
    network: Option<Network>,
    guard: Child,
    /// The guard waits for its end.
    pipe: Mutex<Option<ChildStdin>>,
}

/// Addresses of a bed with a network of its own, which the host reaches through a veth pair.
#[derive(Clone, Debug)]
pub struct Network {
    number: u8,
    family: Family,
}

/// The version of IP in a bed's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    /// There is no other, not even on the loopback interface.
    V6,
}

impl Network {
    /// The host's end of the link; the bed reaches servers of the test process here.
    pub fn host(&self) -> String {
        self.address("253", "fd")
    }

    /// The bed's end of the link; the API server and the registries listen here.
    pub fn bed(&self) -> String {
        self.address("254", "fe")
    }

    fn address(&self, v4: &str, v6: &str) -> String {
        match self.family {
            Family::V4 => format!("10.199.{}.{v4}", self.number),
            Family::V6 => format!("fd00:199:{:x}::{v6}", self.number),
        }
    }

    /// Addresses of Pods.
    pub fn pods(&self) -> String {
        format!("10.199.{}.0/25", self.number)
    }
}

impl Sandbox {
    /// Makes the namespaces; with `network` also a network that only the host reaches.
    pub fn new(cache: &Cache, network: bool) -> Result<Self> {
        Self::with(cache, network.then_some(Family::V4))
    }

    /// The same with a network that has IPv6 and no IPv4.
    pub fn without_ipv4(cache: &Cache) -> Result<Self> {
        Self::with(cache, Some(Family::V6))
    }

    fn with(cache: &Cache, network: Option<Family>) -> Result<Self> {
        fs::create_dir_all(cache.beds())?;
        sweep(cache)?;
        let (dir, name) = unique_dir(cache)?;
        let mut guard = Command::new("bash");
        guard.args(["-c", GUARD, "kruise-bed-guard"]).arg(&dir).arg(&name);
        if network.is_some() {
            guard.arg("--net");
        }
        let log = fs::File::create(dir.join("guard.log"))?;
        let mut guard = guard
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("cannot start bash")?;
        fs::write(dir.join("guard.pid"), identity(guard.id()))?;
        let pipe = Mutex::new(guard.stdin.take());
        let mut bed = Self {
            pipe,
            dir,
            init: 0,
            network: None,
            guard,
        };
        bed.init = wait::until("the bed's namespaces", Duration::from_secs(10), || {
            Ok(fs::read_to_string(bed.dir.join("init.pid"))
                .ok()
                .and_then(|t| t.trim().parse().ok()))
        })
        .with_context(|| format!("see {}; the bed needs root", bed.dir.join("guard.log").display()))?;
        if let Some(family) = network {
            bed.network = Some(bed.connect(family)?);
        }
        Ok(bed)
    }

    /// The bed's folder; it goes with the bed.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The bed's name, unique on this machine.
    pub fn name(&self) -> String {
        self.dir
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// The bed's addresses, where it has a network of its own.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// A command that runs inside the bed. Its end is seen here; its process ID is [`Sandbox::inner_pid`].
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string(), "--pid", "--mount"]);
        if self.network.is_some() {
            command.arg("--net");
        }
        command.arg("--").arg(program.as_ref()).process_group(0);
        command
    }

    /// The process that a child made by [`Sandbox::command`] stands for, as seen from the host.
    pub fn inner_pid(child: &Child) -> Result<Pid> {
        let path = format!("/proc/{0}/task/{0}/children", child.id());
        wait::until("the process in the bed", Duration::from_secs(5), || {
            let text = fs::read_to_string(&path).unwrap_or_default();
            Ok(text
                .split_whitespace()
                .next()
                .and_then(|p| p.parse().ok())
                .map(Pid::from_raw))
        })
    }

    /// Leaves the bed running after our end, until [`down`] is called for the command that kept it.
    pub fn keep(&self, command: &str) -> Result<()> {
        let mut pipe = self
            .pipe
            .lock()
            .map_err(|_| anyhow::anyhow!("poisoned"))?
            .take()
            .context("the bed is kept already")?;
        fs::write(self.dir.join("kept"), command)?;
        writeln!(pipe, "keep").context("the bed's guard is gone")
    }

    fn connect(&self, family: Family) -> Result<Network> {
        let number = (0..=255u8)
            .find(|n| {
                let (host, init) = (format!("kruise-bed{n}"), self.init.to_string());
                run(
                    "ip",
                    &[
                        "link", "add", &host, "type", "veth", "peer", "name", "eth0", "netns", &init,
                    ],
                )
                .is_ok()
            })
            .context("cannot make a veth pair: is this root, and is the kernel module there?")?;
        let net = Network { number, family };
        let link = format!("kruise-bed{number}");
        let (host, bed) = (net.host(), net.bed());
        let inside = match family {
            Family::V4 => {
                run("ip", &["address", "add", &format!("{host}/30"), "dev", &link])?;
                format!(
                    "ip address add {bed}/30 dev eth0 && ip link set eth0 up && ip route add default via {host} && \
                     echo 1 > /proc/sys/net/ipv4/ip_forward"
                )
            }
            Family::V6 => {
                let address = format!("{host}/126");
                run("ip", &["address", "add", &address, "dev", &link, "nodad"])?;
                format!(
                    "ip address add {bed}/126 dev eth0 nodad && ip link set eth0 up && \
                     ip route add default via {host} && ip -4 address flush dev lo"
                )
            }
        };
        run("ip", &["link", "set", &link, "up"])?;
        let init = self.init.to_string();
        run(
            "nsenter",
            &[
                "--target", &init, "--net", "--mount", "--pid", "--", "sh", "-c", &inside,
            ],
        )?;
        if family == Family::V4 {
            run("ip", &["route", "add", &net.pods(), "via", &bed])?;
        }
        Ok(net)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let pipe = self.pipe.get_mut().map(Option::take).unwrap_or_default();
        if pipe.is_some() {
            drop(pipe);
            // The pipe is closed now; the guard ends everything and then itself.
            let _ = self.guard.wait();
        }
    }
}

/// Ends the beds that `command` kept, or all kept ones, and removes what dead ones left. Returns how many were ended.
pub fn down(cache: &Cache, command: Option<&str>) -> Result<usize> {
    let mut ended = 0;
    for dir in folders(cache)? {
        let Some(pid) = kept(&dir, command) else { continue };
        kill(pid, Signal::SIGTERM).ok();
        wait::until("the kept bed's end", Duration::from_secs(60), || {
            Ok((!dir.exists()).then_some(()))
        })?;
        ended += 1;
    }
    sweep(cache)?;
    Ok(ended)
}

/// Removes the folders and cgroups of beds whose guard was killed too.
fn sweep(cache: &Cache) -> Result<()> {
    for dir in folders(cache)? {
        let owner = fs::read_to_string(dir.join("guard.pid")).unwrap_or_default();
        let young = dir
            .metadata()?
            .modified()?
            .elapsed()
            .is_ok_and(|age| age < Duration::from_secs(60));
        if alive(&owner).is_some() || (owner.is_empty() && young) {
            continue;
        }
        let name = dir
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let pattern = format!("*/{name}*");
        let _ = run(
            "find",
            &[
                "/sys/fs/cgroup",
                "-depth",
                "-type",
                "d",
                "-path",
                &pattern,
                "-exec",
                "rmdir",
                "{}",
                "+",
            ],
        );
        fs::remove_dir_all(&dir).ok();
    }
    Ok(())
}

fn folders(cache: &Cache) -> Result<Vec<PathBuf>> {
    match fs::read_dir(cache.beds()) {
        Ok(entries) => Ok(entries.filter_map(|e| e.ok().map(|e| e.path())).collect()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e.into()),
    }
}

/// The guard of a bed that `command`, or any command, kept.
fn kept(dir: &Path, command: Option<&str>) -> Option<Pid> {
    let by = fs::read_to_string(dir.join("kept")).ok()?;
    if command.is_some_and(|command| command != by) {
        return None;
    }
    alive(&fs::read_to_string(dir.join("guard.pid")).ok()?)
}

/// `PID START`: the start time tells a process from a later one with the same number.
fn identity(pid: u32) -> String {
    format!("{pid} {}", start_time(pid).unwrap_or_default())
}

fn alive(identity: &str) -> Option<Pid> {
    let (pid, start) = identity.split_once(' ')?;
    let pid: u32 = pid.parse().ok()?;
    (start_time(pid)? == start).then(|| Pid::from_raw(pid.cast_signed()))
}

fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.to_owned())
}

fn unique_dir(cache: &Cache) -> Result<(PathBuf, String)> {
    for n in 0..10_000u32 {
        let name = format!("kruise-bed-{}-{n}", std::process::id());
        let dir = cache.beds().join(&name);
        match fs::create_dir(&dir) {
            Ok(()) => return Ok((dir, name)),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e.into()),
        }
    }
    bail!("no free folder name in {}", cache.beds().display())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn down_ends_what_its_command_kept() {
        let bed = tempfile::tempdir().unwrap();
        let pid = Some(Pid::from_raw(std::process::id().cast_signed()));
        fs::write(bed.path().join("guard.pid"), identity(std::process::id())).unwrap();
        assert_eq!(kept(bed.path(), None), None);
        fs::write(bed.path().join("kept"), "up").unwrap();
        assert_eq!(kept(bed.path(), None), pid);
        assert_eq!(kept(bed.path(), Some("up")), pid);
        assert_eq!(kept(bed.path(), Some("demo")), None);
    }
}
