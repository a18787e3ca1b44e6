//! Our two programs as container images: one static binary each, and nothing else.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::codegen::{self, repository_dir};
use testbed::cluster::prepare::{self, Part};
use testbed::cluster::{Cache, Image, Registry, with_parent_death_signal};

/// The programs; each is an image of the same name.
pub const PROGRAMS: [&str; 2] = ["kruise-daemon", "kruise-manager"];

/// Folder of the release binaries.
pub struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// Builds static release binaries of both programs; cargo skips what is up to date. `tell` receives cargo's output
    /// lines, as it may wait long for another cargo process.
    pub fn build(tell: impl FnMut(&str)) -> Result<Self> {
        let target_dir = codegen::target_dir(&codegen::cargo_metadata()?)?;
        Self::build_from(&repository_dir(), &target_dir, tell)
    }

    /// The same, of the repository in `root`.
    ///
    /// Each program is built on its own: in one build, the manager's libraries have what only the daemon needs, 0.4 MB.
    pub fn build_from(root: &Path, target_dir: &Path, mut tell: impl FnMut(&str)) -> Result<Self> {
        prepare::ensure(&Cache::open()?, &[Part::Protoc])?;
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let flags = rustc_flags(root, target_dir, &registry_folders()?);
        for program in PROGRAMS {
            let mut cargo = Command::new("cargo");
            cargo
                .args(["build", "--release", "--locked"])
                .args(["--package", program, "--target", &target])
                .current_dir(root)
                .env("CARGO_TARGET_DIR", target_dir)
                .env("CARGO_ENCODED_RUSTFLAGS", flags.join(FLAG_SEPARATOR))
                // Otherwise the allocator's C code has the time of its compilation.
                .env("SOURCE_DATE_EPOCH", "0")
                .env("CARGO_TERM_COLOR", "never")
                .env("CARGO_TERM_PROGRESS_WHEN", "never");
            run_cargo(&cargo, &mut tell)?;
        }
        Ok(Self {
            dir: target_dir.join(target).join("release"),
        })
    }

    /// Folder of both binaries.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of a program.
    pub fn path(&self, program: &str) -> PathBuf {
        self.dir.join(program)
    }

    /// Pushes each program under the image name that it has in `manifests`, the output of `kubectl kustomize`.
    pub fn push(&self, registry: &Registry, manifests: &str) -> Result<()> {
        for program in PROGRAMS {
            let name = image_name(manifests, program)
                .with_context(|| format!("no image of {program} in the manifests"))?;
            let file = format!("/{program}");
            let image = Image::scratch()
                .file(&file, self.path(program))
                .entrypoint([file.as_str()]);
            registry.push(without_host(name), &image)?;
        }
        Ok(())
    }

    /// Size of a program in bytes.
    pub fn size(&self, program: &str) -> Result<u64> {
        let path = self.path(program);
        Ok(path
            .metadata()
            .with_context(|| format!("{} is missing", path.display()))?
            .len())
    }
}

/// Runs a build to its end.
fn run_cargo(cargo: &Command, tell: &mut impl FnMut(&str)) -> Result<()> {
    let mut child = with_parent_death_signal(cargo)
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let mut output = String::new();
    for line in BufReader::new(child.stderr.take().context("no output")?).lines() {
        let line = line?;
        tell(line.trim());
        output.push_str(&line);
        output.push('\n');
    }
    if !child.wait()?.success() {
        bail!("the release build failed:\n{output}");
    }
    Ok(())
}

/// Between the flags in `CARGO_ENCODED_RUSTFLAGS`; those in `RUSTFLAGS` cannot have spaces.
const FLAG_SEPARATOR: &str = "\x1f";

/// The C library is linked in, and the program has no path of this machine, so that its bytes depend on the sources and
/// the tools alone. The Dockerfile does the same.
fn rustc_flags(root: &Path, target_dir: &Path, registries: &[PathBuf]) -> Vec<String> {
    let renamed = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let mut flags = vec!["-Ctarget-feature=+crt-static".to_owned()];
    flags.extend(registries.iter().map(|folder| renamed(folder, "/crates")));
    flags.push(renamed(root, "/src"));
    // The last one that matches counts, and this folder may be in the other.
    flags.push(renamed(target_dir, "/target"));
    flags
}

/// Folders below which cargo unpacks crates, one for each registry.
fn registry_folders() -> Result<Vec<PathBuf>> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    let sources = home.context("no home folder")?.join("registry/src");
    // xtask itself needed some of them.
    let entries = std::fs::read_dir(&sources).with_context(|| format!("no {}", sources.display()))?;
    let mut folders: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    folders.sort();
    Ok(folders)
}

fn image_name<'a>(manifests: &'a str, program: &str) -> Option<&'a str> {
    manifests
        .lines()
        .filter_map(|l| l.trim().trim_start_matches("- ").strip_prefix("image: "))
        .find(|n| {
            Path::new(n)
                .file_name()
                .is_some_and(|f| f.to_string_lossy().split(':').next() == Some(program))
        })
}

/// Path of an image name: a first part with a dot, a colon, or `localhost` is a host.
fn without_host(name: &str) -> &str {
    match name.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => path,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_name_is_read_from_manifests() {
        let text =
            "      - image: example.org/team/kruise-daemon:v1\n        image: team/kruise-manager:v1\n";
        assert_eq!(
            image_name(text, "kruise-daemon"),
            Some("example.org/team/kruise-daemon:v1")
        );
        assert_eq!(image_name(text, "kruise-manager"), Some("team/kruise-manager:v1"));
        assert_eq!(image_name(text, "kruise"), None);
    }

    #[test]
    fn no_path_of_the_machine_stays_in_a_program() {
        let path = Path::new;
        let flags = rustc_flags(
            path("/home/me/a b"),
            path("/home/me/a b/target"),
            &["/r/1".into(), "/r/2".into()],
        );
        let expected = [
            "-Ctarget-feature=+crt-static",
            "--remap-path-prefix=/r/1=/crates",
            "--remap-path-prefix=/r/2=/crates",
            "--remap-path-prefix=/home/me/a b=/src",
            "--remap-path-prefix=/home/me/a b/target=/target",
        ];
        assert_eq!(flags, expected);
    }

    #[test]
    fn registry_host_is_stripped_from_image_name() {
        for (name, path) in [
            ("example.org/a/b:1", "a/b:1"),
            ("localhost/a:1", "a:1"),
            ("team/a:1", "team/a:1"),
        ] {
            assert_eq!(without_host(name), path);
        }
    }
}
