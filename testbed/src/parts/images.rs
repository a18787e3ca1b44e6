//! Builds container images without a container engine, among them the initial images of every registry.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::cache::Cache;
use crate::cluster::registry;
use crate::port;
use crate::process::{run, run_command};
use crate::sandbox::Sandbox;

/// The sandbox container of every Pod: it waits, and exits at once on TERM or INT.
const PAUSE: &str = "#include <signal.h>\n#include <unistd.h>\nstatic void end(int s) { (void)s; _exit(0); }\n\
    int main(void) { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }\n";

/// Runs until TERM, then exits at once. As a container's first process a shell needs the trap to react.
const UNTIL_TERM: &str = "trap 'exit 0' TERM; echo started; while :; do sleep 3600 & wait $!; done";
/// Runs until TERM, then takes two seconds to exit.
const SLOW_STOP: &str = "trap 'sleep 2; exit 0' TERM; echo started; while :; do sleep 3600 & wait $!; done";

/// An image to build: its files and its command.
#[derive(Clone, Debug, Default)]
pub struct Image {
    files: Vec<(String, PathBuf)>,
    busybox: bool,
    random: usize,
    entrypoint: Vec<String>,
    cmd: Vec<String>,
}

impl Image {
    /// An empty image.
    pub fn scratch() -> Self {
        Self::default()
    }

    /// An image with a shell and the usual small programs.
    pub fn busybox() -> Self {
        Self {
            busybox: true,
            ..Self::default()
        }
    }

    /// Adds a file of the host, executable for all, at an absolute path.
    #[must_use]
    pub fn file(mut self, path: &str, source: impl Into<PathBuf>) -> Self {
        self.files.push((path.to_owned(), source.into()));
        self
    }

    /// Adds a program of the host, and the shared libraries that it is linked with.
    pub fn program(self, path: &str, source: impl Into<PathBuf>) -> Result<Self> {
        let source = source.into();
        let libraries = run("ldd", &[&source.display().to_string()])?;
        let libraries = libraries.split_whitespace().filter(|word| word.starts_with('/'));
        let image = libraries.fold(self, |image, library| image.file(library, library));
        Ok(image.file(path, source))
    }

    /// Adds data that cannot be compressed, in MiB; the data differs in each build.
    #[must_use]
    pub fn random(mut self, mebibytes: usize) -> Self {
        self.random = mebibytes;
        self
    }

    /// Sets the program to run, with its first arguments.
    #[must_use]
    pub fn entrypoint<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.entrypoint = words.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the arguments that a Pod can replace.
    #[must_use]
    pub fn cmd<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.cmd = words.into_iter().map(Into::into).collect();
        self
    }

    /// Runs a shell script.
    #[must_use]
    pub fn script(self, script: &str) -> Self {
        self.cmd(["sh", "-c", script])
    }

    /// Builds it as an OCI layout with the one tag `it`.
    pub fn build(&self, layout: &Path) -> Result<()> {
        fs::remove_dir_all(layout).ok();
        let tree = layout.with_extension("tree");
        fs::remove_dir_all(&tree).ok();
        fs::create_dir_all(&tree)?;
        self.write_files(&tree)?;
        let (layout, image) = (layout.display().to_string(), format!("{}:it", layout.display()));
        run("umoci", &["init", "--layout", &layout])?;
        run("umoci", &["new", "--image", &image])?;
        run(
            "umoci",
            &["insert", "--image", &image, &tree.display().to_string(), "/"],
        )?;
        let mut config = Command::new("umoci");
        config.args(["config", "--image", &image, "--author", "test bed"]);
        for (flag, words) in [
            ("--config.entrypoint", &self.entrypoint),
            ("--config.cmd", &self.cmd),
        ] {
            config.args(words.iter().flat_map(|w| [flag, w]));
        }
        run_command(config.args(["--config.env", "PATH=/bin"]))?;
        fs::remove_dir_all(&tree).context("cannot remove the image's files")
    }

    fn write_files(&self, tree: &Path) -> Result<()> {
        for (path, source) in &self.files {
            let target = tree.join(path.trim_start_matches('/'));
            fs::create_dir_all(target.parent().unwrap_or(tree))?;
            fs::copy(source, &target).with_context(|| format!("cannot copy {}", source.display()))?;
            fs::set_permissions(&target, fs::Permissions::from_mode(0o755))?;
        }
        if self.busybox {
            let bin = tree.join("bin");
            fs::create_dir_all(&bin)?;
            fs::copy("/bin/busybox", bin.join("busybox"))?;
            for applet in run("/bin/busybox", &["--list"])?
                .lines()
                .filter(|a| *a != "busybox")
            {
                symlink("busybox", bin.join(applet))?;
            }
            fs::create_dir_all(tree.join("tmp"))?;
        }
        if self.random > 0 {
            let file = format!("of={}", tree.join("data").display());
            run(
                "dd",
                &[
                    "if=/dev/urandom",
                    &file,
                    "bs=1M",
                    &format!("count={}", self.random),
                    "status=none",
                ],
            )?;
        }
        Ok(())
    }
}

pub(crate) fn registry_seed_exists(cache: &Cache) -> bool {
    cache.registry_seed().is_dir()
}

/// Fills a registry's storage with the initial images of test clusters.
pub(crate) fn build_registry_seed(cache: &Cache) -> Result<()> {
    let target = cache.registry_seed();
    let dir = target.parent().context("no folder")?.to_owned();
    fs::create_dir_all(&dir)?;
    let store = target.with_extension("part");
    fs::remove_dir_all(&store).ok();
    let port = port::reserve()?;
    let sandbox = Arc::new(Sandbox::new(cache, false)?);
    let mut registry_server = registry::component(&sandbox, "registry", &store, "127.0.0.1", port, None)?;
    registry_server.start()?;
    let source = sandbox.dir().join("pause.c");
    fs::write(&source, PAUSE)?;
    let pause = sandbox.dir().join("pause");
    run_command(
        Command::new("gcc")
            .args(["-O2", "-static", "-s", "-o"])
            .arg(&pause)
            .arg(&source),
    )?;
    let agnhost = Image::scratch()
        .file("/agnhost", cache.kubernetes("agnhost"))
        .entrypoint(["/agnhost"]);
    let images = [
        (
            "pause:3.10",
            Image::scratch().file("/pause", &pause).entrypoint(["/pause"]),
        ),
        ("library/busybox:1.36", Image::busybox().cmd(["sh"])),
        ("e2e-test-images/agnhost:2.53", agnhost.cmd(["pause"])),
        ("kruise-test/term:1", Image::busybox().script(UNTIL_TERM)),
        (
            "kruise-test/term:2",
            Image::busybox().script(UNTIL_TERM).random(1),
        ),
        ("kruise-test/slow-stop:1", Image::busybox().script(SLOW_STOP)),
    ];
    for (name, image) in images {
        let layout = sandbox.dir().join("layout");
        image.build(&layout)?;
        registry::push_layout(&layout, &format!("127.0.0.1:{port}"), name)?;
    }
    registry_server.stop()?;
    fs::remove_dir_all(&target).ok();
    fs::rename(&store, &target).context("cannot move the images into place")
}
