//! How often containers have run: by their own word, and by kubelet's where it could not start one.

use std::path::{Path, PathBuf};

use super::soak_cluster::{Program, SoakCluster};

/// Where containers and programs say what they did.
pub struct ContainerRuns {
    folder: PathBuf,
    daemon: PathBuf,
    kubelet: PathBuf,
}

impl ContainerRuns {
    pub fn new(bed: &SoakCluster) -> Self {
        let folder = bed.node.runtime.dir().join("runs");
        std::fs::create_dir_all(&folder).unwrap();
        Self {
            folder,
            daemon: bed.log(Program::Daemon).to_owned(),
            kubelet: bed.node.kubelet.log().to_owned(),
        }
    }

    /// Where containers append a line when they start and when they are stopped.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The container was stopped so often, and started once more than that. What kubelet could not start may have run for
    /// a moment: where the disk is full, containerd kills what it started and cannot write down.
    pub fn assert_stop_count(&self, pod: &str, container: &str, stops: usize) {
        let recorded = read(&self.folder.join(format!("{pod}.{container}")));
        let count = |word| recorded.lines().filter(|line| line.starts_with(word)).count();
        let failed = self.failed_starts(pod, container);
        let max_starts = stops + 1 + failed;
        assert!(
            count("stopped") == stops && (stops + 1..=max_starts).contains(&count("started")),
            "container {container} of {pod} was to be stopped {stops} times, and to be started {} to {max_starts} times:\n{recorded}\n{}",
            stops + 1,
            self.related_logs(pod)
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
        let failure_line =
            format!(r#"failed to \"StartContainer\" for \"{container}\" with RunContainerError"#);
        let log = read(&self.kubelet);
        let lines = log
            .lines()
            .filter(|line| mentions_pod(line, pod) && line.contains(&failure_line));
        lines.count()
    }

    /// What our daemon and kubelet say of the Pod.
    fn related_logs(&self, pod: &str) -> String {
        let mut all = String::new();
        for file in [&self.daemon, &self.kubelet] {
            let log = read(file);
            let lines = log.lines().filter(|line| mentions_pod(line, pod));
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
fn mentions_pod(line: &str, pod: &str) -> bool {
    let after_name = line.split(pod).skip(1);
    after_name
        .into_iter()
        .any(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
}
