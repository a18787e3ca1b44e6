//! Flags that an OpenKruise manifest may carry and that need no action here.
//!
//! A chart written for the Go programs must not stop ours from starting, so these are taken, and said to
//! have no effect, instead of being refused.

use clap::Args;

/// Flags of the Go programs that mean nothing to us.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Taken for compatibility, without effect")]
pub struct UpstreamFlags {
    /// klog's verbosity; use RUST_LOG
    #[arg(long = "v", short = 'v', value_name = "LEVEL", hide_short_help = true)]
    verbosity: Option<String>,
    /// Logs always go to standard error
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_short_help = true)]
    logtostderr: Option<String>,
    /// Upstream's gates; what each of them stands for is on here, see docs/operations.md
    #[arg(long, value_name = "NAME=BOOL,…", hide_short_help = true)]
    feature_gates: Option<String>,
    /// There is no profiling listener
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_short_help = true)]
    enable_pprof: Option<String>,
    /// There is no profiling listener
    #[arg(long, value_name = "ADDRESS", hide_short_help = true)]
    pprof_addr: Option<String>,
    /// Requests are paced by the API server, not by a rate
    #[arg(long, value_name = "N", hide_short_help = true)]
    rest_config_qps: Option<String>,
    /// Requests are paced by the API server, not by a rate
    #[arg(long, value_name = "N", hide_short_help = true)]
    rest_config_burst: Option<String>,
}

impl UpstreamFlags {
    /// The names of the flags that were given.
    #[must_use]
    pub fn given(&self) -> Vec<&'static str> {
        let Self {
            verbosity,
            logtostderr,
            feature_gates,
            enable_pprof,
            pprof_addr,
            rest_config_qps,
            rest_config_burst,
        } = self;
        [
            ("--v", verbosity),
            ("--logtostderr", logtostderr),
            ("--feature-gates", feature_gates),
            ("--enable-pprof", enable_pprof),
            ("--pprof-addr", pprof_addr),
            ("--rest-config-qps", rest_config_qps),
            ("--rest-config-burst", rest_config_burst),
        ]
        .into_iter()
        .filter_map(|(name, value)| value.as_ref().map(|_| name))
        .collect()
    }

    /// Says in the log which of the given flags have no effect.
    pub fn tell(&self) {
        let given = self.given();
        if !given.is_empty() {
            tracing::info!(
                flags = given.join(" "),
                "these flags are taken for compatibility and have no effect"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        upstream: UpstreamFlags,
    }

    #[test]
    fn the_arguments_of_upstreams_manifests_are_taken() {
        let arguments = [
            "x",
            "--logtostderr=true",
            "-v=5",
            "--feature-gates=AllAlpha=true,AllBeta=true",
            "--enable-pprof=false",
        ];
        let cli = Cli::try_parse_from(arguments).unwrap();
        assert_eq!(
            cli.upstream.given(),
            ["--v", "--logtostderr", "--feature-gates", "--enable-pprof"]
        );
    }
}
