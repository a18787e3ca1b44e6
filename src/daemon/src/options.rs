//! The daemon's command line; names and meanings are upstream's if upstream has the flag.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};

use super::control::DEFAULT_SOCKET;
use super::image_pull::plan::MAX_START_JITTER;
use kruise_api::node_image::MAX_PIN_SECONDS;
use kruise_ops::FeatureGates;
use kruise_ops::flag_values::{duration, or, path};
use kruise_ops::logs::Format;
use kruise_ops::traces::TraceOptions;
use kruise_ops::upstream_flags::UpstreamFlags;

/// Options of `kruise-daemon` without a subcommand.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The node's name in the cluster
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,

    /// Path to a kubeconfig file; the default is the first that exists of KUBECONFIG, ~/.kube/config and the Pod's service account
    #[arg(long, value_parser = path, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// CRI socket: an absolute path, or one relative to /hostvarrun (/run if that is not mounted). If set, sockets are not detected
    #[arg(long, value_parser = path, value_name = "PATH")]
    pub socket_file: Option<PathBuf>,

    /// Address of /healthz, /readyz and /metrics: HOST:PORT, or :PORT for all interfaces
    #[arg(long, value_parser = or(ADDRESS), default_value = ADDRESS, value_name = "ADDRESS")]
    pub addr: String,

    /// Address of /metrics over HTTPS, for clients whose token RBAC allows to get it: HOST:PORT, or :PORT for all interfaces; none if empty or 0
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ADDRESS")]
    pub secure_metrics_addr: String,

    /// Maximum number of images pulled in parallel on this node; 0 or less means the default: there is always a limit
    #[arg(long, default_value_t = DEFAULT_PULLS, value_name = "N", allow_negative_numbers = true)]
    pub max_workers_for_pull_image: i32,

    /// Maximum number of images pulled in parallel from one registry on this node; 0 means as many as on the node
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub max_workers_per_registry: usize,

    /// Maximum delay of a pull after its request, so that the nodes of a job do not all start at once: 30s; at most 5m. Each node and tag has its own delay, of at most half of the activeDeadlineSeconds
    #[arg(long, default_value = "0s", value_parser = start_jitter, value_name = "DURATION")]
    pub image_pull_start_jitter: Duration,

    /// End a pull early if the image cannot fit on the disk of the node
    #[arg(
        long,
        default_value_t = true,
        action = ArgAction::Set,
        num_args = 0..=1,
        default_missing_value = "true",
        require_equals = true,
        value_name = "BOOL"
    )]
    pub check_image_disk: bool,

    /// Maximum number of seconds for which jobs can pin an image on this node; 0 means that none is pinned
    #[arg(long, default_value_t = MAX_PIN_SECONDS.unsigned_abs(), value_name = "SECONDS")]
    pub max_pin_seconds: u32,

    /// Kubelet's configuration of credential provider plugins (CredentialProviderConfig); without this file there are none
    #[arg(long, value_parser = path, default_value = "/kruise/CredentialProviderPlugin.yaml", value_name = "FILE")]
    pub plugin_config_file: Option<PathBuf>,

    /// Directory with the executables of these plugins
    #[arg(long, value_parser = path, default_value = "/kruise/plugins", value_name = "DIR")]
    pub plugin_bin_dir: Option<PathBuf>,

    /// Unix socket of the node control API ('kruise-daemon status')
    #[arg(long, default_value = DEFAULT_SOCKET, value_name = "PATH")]
    pub control_socket: PathBuf,

    /// Log format. The environment variable RUST_LOG sets the level, for example RUST_LOG=info,kruise=debug
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: Format,

    /// Feature gates, as NAME=true|false separated by commas: DaemonWatchingPod, InPlaceUpdateEnvFromMetadata, PodProbeMarkerGate (all on by default); KruiseDaemon=false switches off all three
    #[arg(long, default_value = "", hide_default_value = true, value_parser = FeatureGates::parse, value_name = "GATES")]
    pub feature_gates: FeatureGates,

    /// OpenTelemetry traces
    #[command(flatten)]
    pub traces: TraceOptions,

    /// Flags of OpenKruise's daemon that have no effect here
    #[command(flatten)]
    pub upstream: UpstreamFlags,
}

/// Reads the start jitter.
fn start_jitter(text: &str) -> Result<Duration, String> {
    let jitter = duration(text)?;
    if jitter > MAX_START_JITTER {
        return Err(format!(
            "{text:?} is more than {} seconds",
            MAX_START_JITTER.as_secs()
        ));
    }
    Ok(jitter)
}

/// Default of `--addr`.
const ADDRESS: &str = "127.0.0.1:10221";
/// Default number of parallel pulls.
const DEFAULT_PULLS: i32 = 5;

impl Options {
    /// Maximum number of parallel pulls, at least 1.
    #[must_use]
    pub fn max_pulls(&self) -> usize {
        let max_workers = if self.max_workers_for_pull_image > 0 {
            self.max_workers_for_pull_image
        } else {
            DEFAULT_PULLS
        };
        usize::try_from(max_workers).unwrap_or(1)
    }

    /// Maximum number of parallel pulls from one registry, at least 1.
    #[must_use]
    pub fn max_pulls_per_registry(&self) -> usize {
        match self.max_workers_per_registry {
            0 => self.max_pulls(),
            given => given.min(self.max_pulls()),
        }
    }

    /// Logs the flags that have no effect, and those whose effect differs from OpenKruise's daemon.
    pub fn log_differences(&self) {
        self.upstream.log();
        if self.max_workers_for_pull_image <= 0 {
            tracing::info!(
                flag = "--max-workers-for-pull-image",
                given = self.max_workers_for_pull_image,
                used = self.max_pulls(),
                "pulls are always limited; the default is used"
            );
        }
    }
}

#[cfg(test)]
impl Default for Options {
    /// The options of an empty command line.
    fn default() -> Self {
        kruise_ops::flag_values::default_args()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::*;
    use kruise_ops::logs::captured_lines;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn log_lines(args: &[&str]) -> Vec<String> {
        let options = Cli::try_parse_from(args).unwrap().options;
        captured_lines(|| options.log_differences())
    }

    #[test]
    fn registry_has_at_most_the_slots_of_the_node() {
        let slots = |args: &[&str]| {
            let args = [&["x"], args].concat();
            Cli::try_parse_from(args)
                .unwrap()
                .options
                .max_pulls_per_registry()
        };
        assert_eq!(slots(&[]), 5);
        assert_eq!(slots(&["--max-workers-per-registry=2"]), 2);
        assert_eq!(
            slots(&["--max-workers-per-registry=9", "--max-workers-for-pull-image=3"]),
            3
        );
    }

    #[test]
    fn start_jitter_is_at_most_five_minutes() {
        let jitter = |args: &[&str]| {
            let args = [&["x"], args].concat();
            let cli = Cli::try_parse_from(args).ok()?;
            Some(cli.options.image_pull_start_jitter.as_secs())
        };
        assert_eq!(jitter(&[]), Some(0));
        assert_eq!(jitter(&["--image-pull-start-jitter=1m30s"]), Some(90));
        assert_eq!(jitter(&["--image-pull-start-jitter=5m"]), Some(300));
        assert_eq!(jitter(&["--image-pull-start-jitter=301s"]), None);
    }

    #[test]
    fn unlimited_pulls_flag_logs_the_default_limit() {
        for given in ["-1", "0"] {
            let flag = format!("--max-workers-for-pull-image={given}");
            let lines = log_lines(&["x", &flag]);
            assert_eq!(lines.len(), 1, "{lines:?}");
            let given = format!("given={given}");
            for text in ["INFO", "--max-workers-for-pull-image", &given, "used=5"] {
                assert!(lines[0].contains(text), "{text} is not in {lines:?}");
            }
        }
        assert!(log_lines(&["x", "--max-workers-for-pull-image=20"]).is_empty());
        assert!(log_lines(&["x"]).is_empty());
    }
}
