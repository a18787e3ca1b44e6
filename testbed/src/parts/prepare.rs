//! Installs the parts of a test cluster: Debian packages and programs built from Go modules. Skips parts that exist.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::cache::{Cache, HELM, KWOK};
use super::debian;
use super::images;
use crate::process::{run, run_command, with_parent_death_signal};

/// Packages of the machine's own Debian suite, installed as they are.
const PACKAGES: [(&str, &str); 12] = [
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("/usr/bin/docker-registry", "docker-registry"),
    ("/usr/bin/umoci", "umoci"),
    ("/usr/bin/skopeo", "skopeo"),
    ("/bin/busybox", "busybox-static"),
    ("/usr/sbin/iptables", "iptables"),
    ("/usr/sbin/conntrack", "conntrack"),
    ("/usr/bin/socat", "socat"),
    ("/sbin/ip", "iproute2"),
    ("/usr/bin/openssl", "openssl"),
    // Makes the wall clock of one program jump.
    (
        "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
        "libfaketime",
    ),
];

/// The Kubernetes programs, in the order in which tests can start to use them.
const PROGRAMS: [&[&str]; 4] = [
    &["cmd/kube-apiserver", "cmd/kubectl"],
    &["cmd/kube-controller-manager", "cmd/kube-scheduler"],
    &["cmd/kubelet", "cmd/kube-proxy"],
    &["test/images/agnhost"],
];

/// A part that a test cluster may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `protoc`, without which the project itself does not build.
    Protoc,
    /// etcd.
    Etcd,
    /// The Kubernetes programs and the agnhost test image's program.
    Kubernetes,
    /// kwok.
    Kwok,
    /// helm.
    Helm,
    /// Prometheus.
    Prometheus,
    /// Chromium, which draws the dashboard.
    Chromium,
    /// runc, CNI plugins, registry, image tools, iptables.
    NodePackages,
    /// containerd of a Debian suite.
    Containerd(&'static str),
    /// The initial images of every registry.
    Images,
}

/// All parts of a node with the default containerd.
pub const NODE_PARTS: [Part; 5] = node_parts("trixie");

/// All parts of a node with containerd of a Debian suite, in the order of installation.
pub const fn node_parts(suite: &'static str) -> [Part; 5] {
    [
        Part::Etcd,
        Part::NodePackages,
        Part::Containerd(suite),
        Part::Kubernetes,
        Part::Images,
    ]
}

/// Installs missing parts and prints a line on standard error for each. Several processes may call it at once.
pub fn ensure(cache: &Cache, parts: &[Part]) -> Result<()> {
    if parts.iter().all(|p| p.is_present(cache)) {
        return Ok(());
    }
    let lock = File::create(cache.root().join("lock"))?;
    lock.lock().context("cannot lock the cache folder")?;
    for part in parts {
        let start = Instant::now();
        if part.is_present(cache) {
            continue;
        }
        let what = part.describe(cache);
        eprintln!("==> {what}");
        part.fetch(cache).context(what)?;
        eprintln!("    done in {:.0} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

impl Part {
    /// Describes the installation, for users.
    pub fn describe(self, cache: &Cache) -> String {
        match self {
            Self::Protoc => "Install protobuf-compiler".into(),
            Self::Etcd => "Fetch etcd (Debian trixie)".into(),
            Self::Kubernetes => {
                let release = cache.release();
                format!("Build Kubernetes {release} from its Go module (about 7 min on 2 cores)")
            }
            Self::Kwok => format!("Build kwok {KWOK} from its Go module"),
            Self::Helm => format!("Build helm {HELM} from its Go module (about 3 min on 2 cores)"),
            Self::Prometheus => "Fetch Prometheus (Debian bookworm)".into(),
            Self::Chromium => "Install Chromium and its fonts".into(),
            Self::NodePackages => "Install runc, CNI plugins, registry and image tools".into(),
            Self::Containerd(suite) => format!("Fetch containerd (Debian {suite})"),
            Self::Images => "Make the test images".into(),
        }
    }

    /// Whether the part is installed.
    pub fn is_present(self, cache: &Cache) -> bool {
        match self {
            Self::Protoc => {
                // protoc searches for its own messages there.
                let has_well_known_types =
                    |dir: &Path| dir.join("../include/google/protobuf/timestamp.proto").is_file();
                find_program_dir("protoc").is_some_and(|dir| has_well_known_types(&dir))
            }
            Self::Etcd => cache.etcd().is_file() && which("openssl") && which("ip"),
            Self::Kubernetes => PROGRAMS.iter().flat_map(|g| g.iter()).all(|p| {
                let name = p.rsplit('/').next().unwrap_or(p);
                cache.kubernetes(name).is_file()
            }),
            Self::Kwok => cache.kwok().is_file(),
            Self::Helm => cache.helm().is_file(),
            Self::Prometheus => cache.prometheus().is_file(),
            Self::Chromium => which("chromium"),
            Self::NodePackages => PACKAGES.iter().all(|(file, _)| Path::new(file).exists()),
            Self::Containerd(suite) => cache
                .debian_package_dir(suite, "containerd")
                .join("usr/bin/containerd")
                .is_file(),
            Self::Images => images::registry_seed_exists(cache),
        }
    }

    fn fetch(self, cache: &Cache) -> Result<()> {
        match self {
            Self::Protoc => debian::install(&["protobuf-compiler", "libprotobuf-dev"]),
            Self::Etcd => {
                if !(which("openssl") && which("ip")) {
                    debian::install(&["openssl", "iproute2"])?;
                }
                debian::unpack(cache, "trixie", "etcd-server")
            }
            Self::Kubernetes => build_kubernetes(cache),
            Self::Kwok => install_go_program("sigs.k8s.io/kwok/cmd/kwok", KWOK, &cache.kwok()),
            Self::Helm => install_go_program("helm.sh/helm/v4/cmd/helm", HELM, &cache.helm()),
            Self::Prometheus => debian::unpack(cache, "bookworm", "prometheus"),
            Self::Chromium => debian::install(&["chromium", "fonts-dejavu-core", "fonts-inter"]),
            Self::NodePackages => {
                let registry_existed = Path::new("/usr/bin/docker-registry").exists();
                debian::install(&PACKAGES.map(|(_, package)| package))?;
                if !registry_existed {
                    // The package starts a registry on the machine, which no user requested. Without systemd
                    // it does not, and this command fails.
                    run("systemctl", &["disable", "--now", "docker-registry"]).ok();
                }
                Ok(())
            }
            Self::Containerd(suite) => debian::unpack(cache, suite, "containerd"),
            Self::Images => images::build_registry_seed(cache),
        }
    }
}

/// Whether a program is in `PATH` or in Debian's folders for administrators' programs.
pub fn which(program: &str) -> bool {
    find_program_dir(program).is_some()
}

fn find_program_dir(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .find(|d| d.join(program).is_file())
}

fn build_kubernetes(cache: &Cache) -> Result<()> {
    let release = cache.release();
    let module = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/testbed")
        .join(release);
    let version = "k8s.io/component-base/version";
    let (major, minor) = release
        .trim_start_matches('v')
        .split_once('.')
        .context("version without a dot")?;
    let minor = minor.split('.').next().unwrap_or_default();
    let flags = format!(
        "-s -w -X {version}.gitVersion={release} -X {version}.gitMajor={major} -X {version}.gitMinor={minor} \
         -X {version}.gitTreeState=clean"
    );
    let target = cache.kubernetes_dir();
    let build_dir = cache.root().join(format!("building-{release}"));
    fs::create_dir_all(&build_dir)?;
    fs::create_dir_all(&target)?;
    for group in PROGRAMS {
        let mut command = Command::new("nice");
        command.args([
            "-n",
            "5",
            "go",
            "build",
            "-mod=readonly",
            "-trimpath",
            "-ldflags",
            &flags,
            "-o",
        ]);
        command
            .arg(format!("{}/", build_dir.display()))
            .env("CGO_ENABLED", "0")
            .current_dir(&module);
        command.args(group.iter().map(|p| format!("k8s.io/kubernetes/{p}")));
        eprintln!("    {}", group.join(", "));
        run_command(&mut with_parent_death_signal(&command))?;
        for program in group {
            // Moved when complete, so that a program in the target folder can be used.
            let name = program.rsplit('/').next().unwrap_or(program);
            fs::rename(build_dir.join(name), target.join(name))?;
        }
    }
    Ok(())
}

/// Builds a program from its Go module, into the folder of `target`.
fn install_go_program(package: &str, version: &str, target: &Path) -> Result<()> {
    let dir = target.parent().context("no folder")?;
    fs::create_dir_all(dir)?;
    let mut command = Command::new("go");
    command
        .args(["install", "-trimpath", "-ldflags", "-s -w"])
        .arg(format!("{package}@{version}"));
    command.env("GOBIN", dir).env("CGO_ENABLED", "0");
    run_command(&mut with_parent_death_signal(&command)).map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn which_finds_programs_in_path() {
        assert!(which("sh"));
        assert!(!which("no-such-program-at-all"));
    }
}
