//! How often containers have run: by their own word, and by kubelet's where it could not start one.

use std::path::{Path, PathBuf};

use super::bed::{Bed, Ours};

/// Where containers and programs say what they did.
pub struct Runs {
    folder: PathBuf,
    daemon: PathBuf,
    kubelet: PathBuf,
}

impl Runs {
    pub fn of(bed: &Bed) -> Self {
        let folder = bed.node.runtime.dir().join("runs");
        std::fs::create_dir_all(&folder).unwrap();
        Self {
            folder,
            daemon: bed.log(Ours::Daemon).to_owned(),
            kubelet: bed.node.kubelet.log().to_owned(),
        }
    }

    /// Where containers append a line when they start and when they are stopped.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The container was stopped so often, and started once more than that. What kubelet could not start may have run for
    /// a moment: where the disk is full, containerd kills what it started and cannot write down.
    pub fn check(&self, pod: &str, container: &str, stops: usize) {
        let own = read(&self.folder.join(format!("{pod}.{container}")));
        let count = |word| own.lines().filter(|line| line.starts_with(word)).count();
        let failed = self.failed_starts(pod, container);
        let most = stops + 1 + failed;
        assert!(
            count("stopped") == stops && (stops + 1..=most).contains(&count("started")),
            "container {container} of {pod} was to be stopped {stops} times, and to be started {} to {most} times:\n{own}\n{}",
            stops + 1,
            self.evidence(pod)
        );
        if count("started") > stops + 1 {
            println!(
                "container {container} of {pod} started {} times; kubelet failed {failed} times",
                count("started")
            );
        }
    }

    /// How often kubelet has failed to start it.
    fn failed_starts(&self, pod: &str, container: &str) -> usize {
        let failed = format!(r#"failed to \"StartContainer\" for \"{container}\" with RunContainerError"#);
        let log = read(&self.kubelet);
        let lines = log
            .lines()
            .filter(|line| names(line, pod) && line.contains(&failed));
        lines.count()
    }

    /// What our daemon and kubelet say of the Pod.
    fn evidence(&self, pod: &str) -> String {
        let mut all = String::new();
        for file in [&self.daemon, &self.kubelet] {
            let log = read(file);
            let lines = log.lines().filter(|line| names(line, pod));
            let lines = lines.filter(|line| !line.contains("looked at the requests"));
            all.extend(lines.map(|line| format!("{}\n", &line[..line.floor_char_boundary(600)])));
        }
        all
    }
}

fn read(file: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(file).unwrap_or_default()).into_owned()
}

/// Whether a line of a log names this Pod, and not only one whose name begins like its own.
fn names(line: &str, pod: &str) -> bool {
    let rest = line.split(pod).skip(1);
    rest.into_iter()
        .any(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
}
