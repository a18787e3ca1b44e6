//! How often containers have run: from their own records, and from kubelet's log for failed starts.

use std::path::{Path, PathBuf};

use super::soak_cluster::{Program, SoakCluster};

/// Files in which containers and programs record what they did.
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

    /// Folder to which containers append a line at each start and stop.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Asserts that the container was stopped `stops` times, and started once more than that. After a failed start it
    /// may have run for a moment: on a full disk, containerd kills a container whose state it cannot write.
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

    /// Lines about the Pod in the logs of our daemon and kubelet.
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

/// Whether a log line names this Pod, and not only one whose name has the same prefix.
fn mentions_pod(line: &str, pod: &str) -> bool {
    let after_name = line.split(pod).skip(1);
    after_name
        .into_iter()
        .any(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
}
