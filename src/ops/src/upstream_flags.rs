//! Flags of OpenKruise's programs that have no effect here, accepted so that existing arguments still work.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlagKind {
    /// `--flag VALUE` or `--flag=VALUE`, which may be empty.
    Value,
    /// `--flag` or `--flag=true|false`.
    Switch,
}
use FlagKind::{Switch, Value};

const LOGS: &str = "RUST_LOG and --log-format choose what is logged, to standard error";
const RATE_LIMITS: &str =
    "requests are not limited by the client; the API server's priority and fairness limits them";
const RETRIES: &str = "failed work is retried after some tenths of a second, with back-off";
const PROFILER: &str = "there is no profiler";
const UNSUPPORTED_KIND: &str = "kruise-rs has no controller for this kind";
const PLUGINS: &str = "it is a flag of kruise-daemon";
const PROTECTION: &str = "the API server's audit log has refused deletions";

/// Flag, its kind, and why it has no effect.
const FLAGS: &[(&str, FlagKind, &str)] = &[
    ("add_dir_header", Switch, LOGS),
    ("advancedcronjob-workers", Value, UNSUPPORTED_KIND),
    ("allow-privileged", Switch, "nothing asks for it"),
    ("alsologtostderr", Switch, LOGS),
    ("assign-bcj-pods-by-scheduler", Switch, UNSUPPORTED_KIND),
    ("assign-pods-by-scheduler", Switch, UNSUPPORTED_KIND),
    ("broadcastjob-workers", Value, UNSUPPORTED_KIND),
    (
        "cloneset-scaling-exclude-preparing-delete",
        Switch,
        "it is a flag of kruise-manager",
    ),
    (
        "controller-cache-sync-timeout",
        Value,
        "lists are retried until they succeed; /readyz names those that are missing",
    ),
    ("daemonset-workers", Value, UNSUPPORTED_KIND),
    ("disable-no-deepcopy", Switch, "there is no such cache"),
    ("enable-pprof", Switch, PROFILER),
    (
        "expectation-timeout",
        Value,
        "no wait for a watch is longer than 30 s",
    ),
    (
        "leader-election-resource-lock",
        Value,
        "leaders are elected by a Lease",
    ),
    ("log-flush-frequency", Value, LOGS),
    ("log-json-info-buffer-size", Value, LOGS),
    ("log-json-split-stream", Switch, LOGS),
    ("log-text-info-buffer-size", Value, LOGS),
    ("log-text-split-stream", Switch, LOGS),
    ("log_backtrace_at", Value, LOGS),
    ("log_dir", Value, LOGS),
    ("log_file", Value, LOGS),
    ("log_file_max_size", Value, LOGS),
    ("logging-format", Value, LOGS),
    ("logtostderr", Switch, LOGS),
    (
        "namespace",
        Value,
        "objects of all namespaces are watched; POD_NAMESPACE names the namespace of this installation",
    ),
    (
        "nodepodprobe-workers",
        Value,
        "--podprobemarker-workers of kruise-manager is for both",
    ),
    ("one_output", Switch, LOGS),
    ("persistentpodstate-workers", Value, UNSUPPORTED_KIND),
    ("plugin-bin-dir", Value, PLUGINS),
    ("plugin-config-file", Value, PLUGINS),
    ("podprobemarker-workers", Value, "it is a flag of kruise-manager"),
    ("podunavailablebudget-workers", Value, UNSUPPORTED_KIND),
    ("pprof-addr", Value, PROFILER),
    ("protection-log-path", Value, PROTECTION),
    ("rate-limiter-base-delay", Value, RETRIES),
    ("rate-limiter-bucket-size", Value, RETRIES),
    ("rate-limiter-max-delay", Value, RETRIES),
    ("rate-limiter-qps", Value, RETRIES),
    ("resourcedistribution-workers", Value, UNSUPPORTED_KIND),
    ("rest-config-burst", Value, RATE_LIMITS),
    ("rest-config-qps", Value, RATE_LIMITS),
    ("sidecarset-workers", Value, "it is a flag of kruise-manager"),
    (
        "sidecarterminator-workers",
        Value,
        "it is a flag of kruise-manager",
    ),
    ("skip_headers", Switch, LOGS),
    ("skip_log_headers", Switch, LOGS),
    ("statefulset-workers", Value, UNSUPPORTED_KIND),
    ("stderrthreshold", Value, LOGS),
    ("sync-period", Value, "nothing is reconciled at fixed intervals"),
    ("uniteddeployment-workers", Value, UNSUPPORTED_KIND),
    ("v", Value, LOGS),
    ("vmodule", Value, LOGS),
    (
        "webhook-initialize-timeout",
        Value,
        "webhooks are served as soon as there are certificates",
    ),
    ("workloadspread-workers", Value, UNSUPPORTED_KIND),
    ("ws-enabled-versioned-status", Value, UNSUPPORTED_KIND),
];

/// The given flags without effect. Flatten it last: a flag that the program itself has is left out.
#[derive(Clone, Debug, Default)]
pub struct UpstreamFlags {
    given: Vec<(&'static str, &'static str)>,
}

impl UpstreamFlags {
    /// The given flags, without dashes, and why they have no effect.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.given.iter().copied()
    }

    /// Logs which of the given flags have no effect, and why.
    pub fn log(&self) {
        for (flag, why) in self.given() {
            tracing::warn!(flag = format!("--{flag}"), why, "flag has no effect");
        }
    }
}

impl Args for UpstreamFlags {
    fn augment_args(command: Command) -> Command {
        let is_own_flag =
            |command: &Command, name| command.get_arguments().any(|arg| arg.get_long() == Some(name));
        FLAGS.iter().fold(command, |command, (name, takes, _)| {
            if is_own_flag(&command, *name) {
                return command;
            }
            let arg = Arg::new(*name).long(*name).hide(true).action(ArgAction::Set);
            let arg = match takes {
                Value => arg.num_args(1).allow_hyphen_values(true),
                Switch => arg
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true"),
            };
            command.arg(if *name == "v" { arg.short('v') } else { arg })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for UpstreamFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let was_given = |name: &str| matches.ids().any(|id| id.as_str() == name);
        let given = FLAGS.iter().filter(|(name, ..)| was_given(name));
        Ok(Self {
            given: given.map(|(name, _, why)| (*name, *why)).collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    #[command(args_override_self = true)]
    struct Cli {
        #[arg(long)]
        sync_period: Option<String>,
        #[command(flatten)]
        upstream: UpstreamFlags,
    }

    #[test]
    fn upstream_flags_without_effect_are_listed() {
        let args = [
            "x",
            "--logtostderr",
            "-v=4",
            "--v=5",
            "--enable-pprof=false",
            "--rest-config-burst",
            "-1",
            "--plugin-config-file=",
            "--sync-period=1s",
        ];
        let cli = Cli::try_parse_from(args).unwrap();
        let named: Vec<_> = cli.upstream.given().map(|(flag, _)| flag).collect();
        let expected = [
            "enable-pprof",
            "logtostderr",
            "plugin-config-file",
            "rest-config-burst",
            "v",
        ];
        assert_eq!(named, expected);
        assert_eq!(cli.sync_period.as_deref(), Some("1s"), "the program's own flag");
    }

    #[test]
    fn flag_without_effect_is_logged_with_the_reason() {
        let cli = Cli::try_parse_from(["x", "--enable-pprof=true"]).unwrap();
        let lines = crate::logs::captured_lines(|| cli.upstream.log());
        assert_eq!(lines.len(), 1, "{lines:?}");
        for words in ["WARN", "--enable-pprof", PROFILER] {
            assert!(lines[0].contains(words), "{lines:?}");
        }
    }
}
