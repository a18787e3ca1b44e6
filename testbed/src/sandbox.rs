//! The namespaces of a test cluster, and the guard that removes them.
//!
//! A sandbox has its own process, mount and (with a node) network namespace, so the kernel removes its processes,
//! mounts, bridges and firewall rules. A guard script watches a pipe from this process: when this process exits, for
//! any reason, the guard ends the namespaces and removes the sandbox's folder and cgroups.

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

use crate::cgroup::cgroups_named;
use crate::parts::Cache;
use crate::process::{run, run_command};
use crate::wait;

/// $1: the sandbox's folder; $2: its name, which is also the name of its cgroups; then flags of `unshare`.
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

/// Namespaces, folder and guard of one test cluster. Drop ends all of its processes.
#[derive(Debug)]
pub struct Sandbox {
    dir: PathBuf,
    init: i32,
    network: Option<Network>,
    guard: Child,
    /// The guard waits until this pipe is closed.
    guard_stdin: Mutex<Option<ChildStdin>>,
}

/// Addresses of a sandbox with its own network, which the host reaches through a veth pair.
#[derive(Clone, Debug)]
pub struct Network {
    number: u8,
    family: IpFamily,
}

/// The IP version of a sandbox's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IpFamily {
    V4,
    /// No IPv4, not even on the loopback interface.
    V6,
}

impl Network {
    /// The host's end of the link; the sandbox reaches servers of the test process here.
    pub fn host_address(&self) -> String {
        self.address("253", "fd")
    }

    /// The sandbox's end of the link; the API server and the registries listen here.
    pub fn sandbox_address(&self) -> String {
        self.address("254", "fe")
    }

    fn address(&self, v4: &str, v6: &str) -> String {
        match self.family {
            IpFamily::V4 => format!("10.199.{}.{v4}", self.number),
            IpFamily::V6 => format!("fd00:199:{:x}::{v6}", self.number),
        }
    }

    /// Name of the device in another sandbox that is linked with this one.
    pub fn link_name(&self) -> String {
        format!("to-bed{}", self.number)
    }

    /// Address range of Pods.
    pub fn pod_cidr(&self) -> String {
        format!("10.199.{}.0/25", self.number)
    }
}

impl Sandbox {
    /// Creates the namespaces; with `network` also a network that only the host reaches.
    pub fn new(cache: &Cache, network: bool) -> Result<Self> {
        Self::create(cache, network.then_some(IpFamily::V4))
    }

    /// Creates the namespaces and a network with IPv6 and without IPv4.
    pub fn without_ipv4(cache: &Cache) -> Result<Self> {
        Self::create(cache, Some(IpFamily::V6))
    }

    fn create(cache: &Cache, network: Option<IpFamily>) -> Result<Self> {
        fs::create_dir_all(cache.sandboxes_dir())?;
        remove_stale_sandboxes(cache)?;
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
        fs::write(dir.join("guard.pid"), process_identity(guard.id()))?;
        let pipe = Mutex::new(guard.stdin.take());
        let mut sandbox = Self {
            guard_stdin: pipe,
            dir,
            init: 0,
            network: None,
            guard,
        };
        sandbox.init = wait::until("the bed's namespaces", Duration::from_secs(10), || {
            Ok(fs::read_to_string(sandbox.dir.join("init.pid"))
                .ok()
                .and_then(|t| t.trim().parse().ok()))
        })
        .with_context(|| {
            format!(
                "see {}; the bed needs root",
                sandbox.dir.join("guard.log").display()
            )
        })?;
        if let Some(family) = network {
            sandbox.network = Some(sandbox.create_network(family)?);
        }
        Ok(sandbox)
    }

    /// The sandbox's folder, removed with the sandbox.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The sandbox's name, unique on this machine.
    pub fn name(&self) -> String {
        self.dir
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// The sandbox's addresses, if it has its own network.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// A command that runs inside the sandbox. Its exit is visible here; its process ID is [`Sandbox::inner_pid`].
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string(), "--pid", "--mount"]);
        if self.network.is_some() {
            command.arg("--net");
        }
        command.arg("--").arg(program.as_ref()).process_group(0);
        command
    }

    /// The host's process ID of the program that a child from [`Sandbox::command`] runs in the sandbox.
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

    /// Links the networks of two sandboxes, so that their programs and Pods reach each other; the host forwards nothing.
    pub fn link(&self, other: &Self) -> Result<()> {
        let (here, there) = (self.linkable()?, other.linkable()?);
        let (here_init, there_init) = (self.init.to_string(), other.init.to_string());
        let (to_there, to_here) = (there.link_name(), here.link_name());
        run(
            "ip",
            &[
                "link",
                "add",
                &to_there,
                "netns",
                &here_init,
                "type",
                "veth",
                "peer",
                "name",
                &to_here,
                "netns",
                &there_init,
            ],
        )?;
        for (sandbox, device) in [(self, &to_there), (other, &to_here)] {
            run_command(sandbox.command("ip").args(["link", "set", device, "up"]))?;
        }
        self.set_linked(other, true)?;
        other.set_linked(self, true)
    }

    /// Sends what is for a linked sandbox and its Pods there, or discards it.
    pub fn set_linked(&self, other: &Self, linked: bool) -> Result<()> {
        let (here, there) = (self.linkable()?.sandbox_address(), other.linkable()?);
        let (address, device) = (there.sandbox_address(), there.link_name());
        let mut routes = [vec![address.clone()], vec![there.pod_cidr()]];
        if linked {
            routes[1].extend(["via".into(), address, "onlink".into()]);
            for route in &mut routes {
                route.extend(["dev".into(), device.clone(), "src".into(), here.clone()]);
            }
        } else {
            routes
                .iter_mut()
                .for_each(|route| route.insert(0, "blackhole".into()));
        }
        for route in routes {
            run_command(self.command("ip").args(["route", "replace"]).args(route))?;
        }
        Ok(())
    }

    fn linkable(&self) -> Result<&Network> {
        self.network
            .as_ref()
            .filter(|net| net.family == IpFamily::V4)
            .context("the bed has no network with IPv4")
    }

    /// Keeps the sandbox running after this process exits, until [`down`] is called for the command that kept it.
    pub fn keep_running(&self, command: &str) -> Result<()> {
        let mut pipe = self
            .guard_stdin
            .lock()
            .map_err(|_| anyhow::anyhow!("poisoned"))?
            .take()
            .context("the bed is kept already")?;
        fs::write(self.dir.join("kept"), command)?;
        writeln!(pipe, "keep").context("the bed's guard is gone")
    }

    fn create_network(&self, family: IpFamily) -> Result<Network> {
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
        let (host, bed) = (net.host_address(), net.sandbox_address());
        let setup_script = match family {
            IpFamily::V4 => {
                run("ip", &["address", "add", &format!("{host}/30"), "dev", &link])?;
                format!(
                    "ip address add {bed}/30 dev eth0 && ip link set eth0 up && ip route add default via {host} && \
                     echo 1 > /proc/sys/net/ipv4/ip_forward"
                )
            }
            IpFamily::V6 => {
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
                "--target",
                &init,
                "--net",
                "--mount",
                "--pid",
                "--",
                "sh",
                "-c",
                &setup_script,
            ],
        )?;
        if family == IpFamily::V4 {
            run("ip", &["route", "add", &net.pod_cidr(), "via", &bed])?;
        }
        Ok(net)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let pipe = self.guard_stdin.get_mut().map(Option::take).unwrap_or_default();
        if pipe.is_some() {
            drop(pipe);
            // The pipe is closed now; the guard ends all processes and then exits.
            let _ = self.guard.wait();
        }
    }
}

/// Ends the sandboxes that `command` kept, or all kept ones, and removes leftovers of dead ones. Returns the number of
/// ended sandboxes.
pub fn down(cache: &Cache, command: Option<&str>) -> Result<usize> {
    let mut ended = 0;
    for dir in sandbox_dirs(cache)? {
        let Some(pid) = kept_guard_pid(&dir, command) else {
            continue;
        };
        kill(pid, Signal::SIGTERM).ok();
        wait::until("the kept bed's end", Duration::from_secs(60), || {
            Ok((!dir.exists()).then_some(()))
        })?;
        ended += 1;
    }
    remove_stale_sandboxes(cache)?;
    Ok(ended)
}

/// Removes the folders and cgroups of sandboxes whose guard was killed too.
fn remove_stale_sandboxes(cache: &Cache) -> Result<()> {
    for dir in sandbox_dirs(cache)? {
        let guard = fs::read_to_string(dir.join("guard.pid")).unwrap_or_default();
        let is_recent = dir
            .metadata()?
            .modified()?
            .elapsed()
            .is_ok_and(|age| age < Duration::from_secs(60));
        if running_pid(&guard).is_some() || (guard.is_empty() && is_recent) {
            continue;
        }
        let name = dir.file_name().context("a folder without a name")?;
        for group in cgroups_named(&name.to_string_lossy())? {
            let _ = fs::remove_dir(group);
        }
        fs::remove_dir_all(&dir).ok();
    }
    Ok(())
}

fn sandbox_dirs(cache: &Cache) -> Result<Vec<PathBuf>> {
    match fs::read_dir(cache.sandboxes_dir()) {
        Ok(entries) => Ok(entries.filter_map(|e| e.ok().map(|e| e.path())).collect()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e.into()),
    }
}

/// The guard's process ID if the sandbox was kept by `command`, or by any command for `None`.
fn kept_guard_pid(dir: &Path, command: Option<&str>) -> Option<Pid> {
    let kept_by = fs::read_to_string(dir.join("kept")).ok()?;
    if command.is_some_and(|command| command != kept_by) {
        return None;
    }
    running_pid(&fs::read_to_string(dir.join("guard.pid")).ok()?)
}

/// `PID START`: the start time distinguishes a process from a later one with the same process ID.
fn process_identity(pid: u32) -> String {
    format!("{pid} {}", start_time(pid).unwrap_or_default())
}

fn running_pid(process_identity: &str) -> Option<Pid> {
    let (pid, start) = process_identity.split_once(' ')?;
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
        let dir = cache.sandboxes_dir().join(&name);
        match fs::create_dir(&dir) {
            Ok(()) => return Ok((dir, name)),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e.into()),
        }
    }
    bail!("no free folder name in {}", cache.sandboxes_dir().display())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn kept_sandbox_is_found_by_its_command() {
        let dir = tempfile::tempdir().unwrap();
        let pid = Some(Pid::from_raw(std::process::id().cast_signed()));
        fs::write(dir.path().join("guard.pid"), process_identity(std::process::id())).unwrap();
        assert_eq!(kept_guard_pid(dir.path(), None), None);
        fs::write(dir.path().join("kept"), "up").unwrap();
        assert_eq!(kept_guard_pid(dir.path(), None), pid);
        assert_eq!(kept_guard_pid(dir.path(), Some("up")), pid);
        assert_eq!(kept_guard_pid(dir.path(), Some("demo")), None);
    }
}
