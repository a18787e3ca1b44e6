//! Cache folder of downloaded and built parts.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::kubernetes;

/// Version of kwok, which simulates thousands of nodes.
pub const KWOK: &str = "v0.8.0";
/// Version of Helm, which installs the chart in tests.
pub const HELM: &str = "v4.3.1";

/// The cache folder: `KRUISE_TESTBED_CACHE`, else `kruise-rs` in `XDG_CACHE_HOME`, else in `~/.cache`.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
    release: &'static str,
}

impl Cache {
    /// Opens the folder and creates it if it is missing.
    pub fn open() -> Result<Self> {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let root = variable("KRUISE_TESTBED_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|d| d.join("kruise-rs")))
            .or_else(|| variable("HOME").map(|d| d.join(".cache/kruise-rs")))
            .context("no cache folder: set KRUISE_TESTBED_CACHE, XDG_CACHE_HOME or HOME")?;
        fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
        Ok(Self {
            root,
            release: kubernetes::release()?,
        })
    }

    /// Root of the cache folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The Kubernetes release that test clusters with this cache run.
    pub fn release(&self) -> &'static str {
        self.release
    }

    /// The same folder, for a different Kubernetes release.
    #[must_use]
    pub fn with_release(mut self, release: &'static str) -> Self {
        self.release = release;
        self
    }

    /// Folder of the Kubernetes programs.
    pub fn kubernetes_dir(&self) -> PathBuf {
        self.root.join(format!("kubernetes-{}", self.release))
    }

    /// A Kubernetes program; `KUBEBUILDER_ASSETS` is searched first.
    pub fn kubernetes(&self, program: &str) -> PathBuf {
        kubebuilder_asset(program).unwrap_or_else(|| self.kubernetes_dir().join(program))
    }

    /// The kwok program.
    pub fn kwok(&self) -> PathBuf {
        self.root.join(format!("kwok-{KWOK}/kwok"))
    }

    /// The helm program.
    pub fn helm(&self) -> PathBuf {
        self.root.join(format!("helm-{HELM}/helm"))
    }

    /// The Prometheus program.
    pub fn prometheus(&self) -> PathBuf {
        self.debian_package_dir("bookworm", "prometheus")
            .join("usr/bin/prometheus")
    }

    /// The etcd program; `KUBEBUILDER_ASSETS` is searched first.
    pub fn etcd(&self) -> PathBuf {
        kubebuilder_asset("etcd").unwrap_or_else(|| {
            self.debian_package_dir("trixie", "etcd-server")
                .join("usr/bin/etcd")
        })
    }

    /// Folder of an unpacked package of another Debian suite.
    pub fn debian_package_dir(&self, suite: &str, package: &str) -> PathBuf {
        self.root.join("debian").join(suite).join(package)
    }

    /// Initial content of every test cluster's registry.
    pub fn registry_seed(&self) -> PathBuf {
        self.root.join("images/registry")
    }

    /// Folder with the state of running sandboxes.
    pub fn sandboxes_dir(&self) -> PathBuf {
        self.root.join("beds")
    }
}

fn kubebuilder_asset(program: &str) -> Option<PathBuf> {
    let path = PathBuf::from(std::env::var_os("KUBEBUILDER_ASSETS")?).join(program);
    path.is_file().then_some(path)
}
