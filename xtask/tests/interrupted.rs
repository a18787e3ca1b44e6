//! Nothing is left of a bed whose program is interrupted during its start, or that is kept and ended later. It starts
//! real programs: `cargo xtask test` runs it.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use testbed::cluster::{Cache, cgroups_named, prepare, wait};

/// A cache with its own folder for beds, so that `down` ends no others.
struct PrivateCache(PathBuf);

impl PrivateCache {
    fn new(name: &str) -> Self {
        let cache = Cache::open().unwrap();
        prepare::ensure(&cache, &prepare::NODE_PARTS).unwrap();
        let dir = std::env::temp_dir().join(format!("kruise-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        for part in fs::read_dir(cache.root()).unwrap().map(Result::unwrap) {
            if part.path() != cache.sandboxes_dir() {
                symlink(part.path(), dir.join(part.file_name())).unwrap();
            }
        }
        Self(dir)
    }

    fn xtask(&self, command: &str) -> Command {
        // If the tests themselves run in the background, their children would ignore Ctrl-C.
        let mut xtask = Command::new("env");
        xtask.args(["--default-signal=INT", env!("CARGO_BIN_EXE_xtask"), command]);
        xtask.env("KRUISE_TESTBED_CACHE", &self.0);
        xtask
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // As a shell starts it: with its children in one process group, which Ctrl-C interrupts.
        xtask.process_group(0);
        xtask
    }

    /// Folders of beds.
    fn cluster_dirs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("beds")).into_iter().flatten();
        entries.map(|e| e.unwrap().path()).collect()
    }
}

impl Drop for PrivateCache {
    fn drop(&mut self) {
        // A failed test may have left a bed.
        let _ = self.xtask("down").status();
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Kernel objects of a bed.
struct KernelTraces {
    dir: PathBuf,
    namespace: PathBuf,
    link: Option<(PathBuf, String)>,
}

impl KernelTraces {
    fn of_cluster(dir: &Path) -> Self {
        let init = fs::read_to_string(dir.join("init.pid")).unwrap();
        let namespace = fs::read_link(format!("/proc/{}/ns/pid", init.trim())).unwrap();
        // The kubeconfig has the address, which contains the number of the link.
        let config = fs::read_to_string(dir.join("admin.kubeconfig")).unwrap_or_default();
        let number = config
            .split_once("https://10.199.")
            .and_then(|(_, rest)| rest.split('.').next());
        let link = number.map(|n| PathBuf::from(format!("/sys/class/net/kruise-bed{n}/ifindex")));
        let link = link.map(|file| (file.clone(), fs::read_to_string(file).unwrap()));
        Self {
            dir: dir.to_owned(),
            namespace,
            link,
        }
    }

    /// Description of what still exists.
    fn leftover(&self) -> Option<String> {
        let name = self.dir.file_name().unwrap().to_str().unwrap();
        if self.dir.exists() {
            return Some(format!("{}", self.dir.display()));
        }
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let in_namespace = |process: &fs::DirEntry| {
            fs::read_link(process.path().join("ns/pid")).is_ok_and(|n| n == self.namespace)
        };
        if let Some(process) = processes.into_iter().find(in_namespace) {
            return Some(format!("process {}", process.file_name().display()));
        }
        let groups = cgroups_named(name).unwrap();
        if !groups.is_empty() {
            return Some(format!("{groups:?}"));
        }
        if fs::read_to_string("/proc/mounts").unwrap().contains(name) {
            return Some("a mount".into());
        }
        let same_link =
            |(file, index): &(PathBuf, String)| fs::read_to_string(file).is_ok_and(|i| i == *index);
        self.link
            .as_ref()
            .filter(|l| same_link(l))
            .map(|(file, _)| format!("{}", file.display()))
    }

    fn wait_until_removed(&self) {
        let removed = wait::until("the end of the bed", wait::WAIT_TIMEOUT, || {
            Ok(self.leftover().is_none().then_some(()))
        });
        assert!(removed.is_ok(), "left: {:?}", self.leftover());
    }
}

/// Waits until the starting bed has that file in its folder.
fn wait_for_file(cache: &PrivateCache, program: &mut Child, file: &str) -> PathBuf {
    wait::until(file, wait::WAIT_TIMEOUT, || {
        let exit_status = program.try_wait()?;
        anyhow::ensure!(exit_status.is_none(), "it ended before there was a {file}");
        Ok(cache
            .cluster_dirs()
            .into_iter()
            .find(|dir| dir.join(file).exists()))
    })
    .unwrap()
}

#[test]
fn interrupted_start_is_cleaned_up() {
    let cache = PrivateCache::new("interrupted");
    for file in ["init.pid", "containerd.log", "kube-apiserver.log"] {
        for ctrl_c in [true, false] {
            let mut program = cache.xtask("up").spawn().unwrap();
            let traces = KernelTraces::of_cluster(&wait_for_file(&cache, &mut program, file));
            let pid = Pid::from_raw(program.id().cast_signed());
            if ctrl_c {
                killpg(pid, Signal::SIGINT).unwrap();
            } else {
                kill(pid, Signal::SIGKILL).unwrap();
            }
            assert!(!program.wait().unwrap().success());
            traces.wait_until_removed();
        }
    }
}

#[test]
fn kept_cluster_runs_until_xtask_down() {
    let cache = PrivateCache::new("kept");
    assert!(cache.xtask("up").status().unwrap().success());
    let dirs = cache.cluster_dirs();
    assert_eq!(dirs.len(), 1, "{dirs:?}");
    let traces = KernelTraces::of_cluster(&dirs[0]);
    let kubectl = Cache::open().unwrap().kubernetes("kubectl");
    let mut nodes = Command::new(kubectl);
    nodes
        .args(["get", "nodes", "--kubeconfig"])
        .arg(dirs[0].join("admin.kubeconfig"));
    assert!(
        testbed::cluster::run_command(&mut nodes)
            .unwrap()
            .contains("Ready"),
        "the kept node answers"
    );
    assert!(cache.xtask("down").status().unwrap().success());
    assert!(!dirs[0].exists(), "its folder is the last to go");
    traces.wait_until_removed();
}
