//! What is left of a bed whose program is interrupted half-way, or that is kept and ended later: nothing.
//! It starts real programs: `cargo xtask test` runs it.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use testbed::cluster::{Cache, prepare, run, wait};

/// The cache with a folder of its own for beds, so that `down` ends no others.
struct Own(PathBuf);

impl Own {
    fn new(name: &str) -> Self {
        let cache = Cache::open().unwrap();
        prepare::ensure(&cache, &prepare::NODE).unwrap();
        let own = std::env::temp_dir().join(format!("kruise-{name}-{}", std::process::id()));
        fs::create_dir(&own).unwrap();
        for part in fs::read_dir(cache.root()).unwrap().map(Result::unwrap) {
            if part.path() != cache.beds() {
                symlink(part.path(), own.join(part.file_name())).unwrap();
            }
        }
        Self(own)
    }

    fn xtask(&self, command: &str) -> Command {
        // Where the tests themselves run in the background, their children would ignore Ctrl-C.
        let mut xtask = Command::new("env");
        xtask.args(["--default-signal=INT", env!("CARGO_BIN_EXE_xtask"), command]);
        xtask.env("KRUISE_TESTBED_CACHE", &self.0);
        xtask
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // As a shell starts it: with its children in one group, which is what Ctrl-C interrupts.
        xtask.process_group(0);
        xtask
    }

    /// Folders of beds.
    fn beds(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("beds")).into_iter().flatten();
        entries.map(|e| e.unwrap().path()).collect()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // A test that failed may have left a bed.
        let _ = self.xtask("down").status();
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What the kernel has of a bed.
struct Traces {
    dir: PathBuf,
    namespace: PathBuf,
    link: Option<(PathBuf, String)>,
}

impl Traces {
    fn of(dir: &Path) -> Self {
        let init = fs::read_to_string(dir.join("init.pid")).unwrap();
        let namespace = fs::read_link(format!("/proc/{}/ns/pid", init.trim())).unwrap();
        // The kubeconfig has the address, which has the number of the link.
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

    /// What is still there, in words.
    fn left(&self) -> Option<String> {
        let name = self.dir.file_name().unwrap().to_str().unwrap();
        if self.dir.exists() {
            return Some(format!("{}", self.dir.display()));
        }
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let of_the_bed = |process: &fs::DirEntry| {
            fs::read_link(process.path().join("ns/pid")).is_ok_and(|n| n == self.namespace)
        };
        if let Some(process) = processes.into_iter().find(of_the_bed) {
            return Some(format!("process {}", process.file_name().display()));
        }
        // Groups of other beds may go while it looks.
        let groups = [
            "/sys/fs/cgroup",
            "-ignore_readdir_race",
            "-name",
            &format!("*{name}*"),
        ];
        let groups = run("find", &groups).unwrap();
        if !groups.is_empty() {
            return Some(groups);
        }
        if fs::read_to_string("/proc/mounts").unwrap().contains(name) {
            return Some("a mount".into());
        }
        let same = |(file, index): &(PathBuf, String)| fs::read_to_string(file).is_ok_and(|i| i == *index);
        self.link
            .as_ref()
            .filter(|l| same(l))
            .map(|(file, _)| format!("{}", file.display()))
    }

    fn wait_for_the_end(&self) {
        let gone = wait::until("the end of the bed", wait::PATIENCE, || {
            Ok(self.left().is_none().then_some(()))
        });
        assert!(gone.is_ok(), "left: {:?}", self.left());
    }
}

/// Waits until the starting bed has that file in its folder.
fn reached(own: &Own, program: &mut Child, file: &str) -> PathBuf {
    wait::until(file, wait::PATIENCE, || {
        let over = program.try_wait()?;
        anyhow::ensure!(over.is_none(), "it ended before there was a {file}");
        Ok(own.beds().into_iter().find(|dir| dir.join(file).exists()))
    })
    .unwrap()
}

#[test]
fn an_interrupted_start_leaves_nothing() {
    let own = Own::new("interrupted");
    for file in ["init.pid", "containerd.log", "kube-apiserver.log"] {
        for ctrl_c in [true, false] {
            let mut program = own.xtask("up").spawn().unwrap();
            let traces = Traces::of(&reached(&own, &mut program, file));
            let pid = Pid::from_raw(program.id().cast_signed());
            if ctrl_c {
                killpg(pid, Signal::SIGINT).unwrap();
            } else {
                kill(pid, Signal::SIGKILL).unwrap();
            }
            assert!(!program.wait().unwrap().success());
            traces.wait_for_the_end();
        }
    }
}

#[test]
fn a_bed_that_is_kept_stays_until_it_is_told_to_go() {
    let own = Own::new("kept");
    assert!(own.xtask("up").status().unwrap().success());
    let beds = own.beds();
    assert_eq!(beds.len(), 1, "{beds:?}");
    let traces = Traces::of(&beds[0]);
    let kubectl = Cache::open().unwrap().kubernetes("kubectl");
    let mut nodes = Command::new(kubectl);
    nodes
        .args(["get", "nodes", "--kubeconfig"])
        .arg(beds[0].join("admin.kubeconfig"));
    assert!(
        testbed::cluster::finish(&mut nodes).unwrap().contains("Ready"),
        "the kept node answers"
    );
    assert!(own.xtask("down").status().unwrap().success());
    assert!(!beds[0].exists(), "its folder is the last to go");
    traces.wait_for_the_end();
}
