//! Every flag of OpenKruise's programs starts ours.
#![allow(clippy::unwrap_used, clippy::panic)]

use clap::Parser;
use kruise::{manager, node};

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct Manager {
    #[command(flatten)]
    options: manager::Options,
}

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct Daemon {
    #[command(flatten)]
    options: node::Options,
}

/// What `--help` of OpenKruise's programs lists: `FLAG TYPE` a line.
const MANAGER: &str = include_str!("data/flags/kruise-manager.txt");
const DAEMON: &str = include_str!("data/flags/kruise-daemon.txt");

/// Arguments with the flag, each of which pflag takes.
fn arguments(flag: &str, of: &str) -> Vec<String> {
    let values: &[&str] = match of {
        "bool" => {
            return ["", "=true", "=false"]
                .map(|end| format!("--{flag}{end}"))
                .to_vec();
        }
        "int" | "uint" => &["0", "5", "30"],
        "Level" | "severity" => &["4"],
        "duration" => &["0", "2s", "12s", "1m30s"],
        "quantity" => &["0", "512", "4Mi"],
        "mapStringBool" => &["", "AllAlpha=true,PodWebhook=false"],
        "traceLocation" => &[":0", "file.go:234"],
        "pattern=N,..." | "moduleSpec" => &["", "a=1,b=2"],
        "string" => &["", "x"],
        other => panic!("{flag}: values of type {other}"),
    };
    values.iter().map(|value| format!("--{flag}={value}")).collect()
}

fn check<P: Parser>(program: &str, flags: &str) {
    let lines: Vec<_> = flags.lines().map(|line| line.split_once(' ').unwrap()).collect();
    assert!(lines.len() > 30, "{program}");
    for (flag, of) in &lines {
        for argument in arguments(flag, of) {
            if let Err(why) = P::try_parse_from([program, &argument]) {
                panic!("{program} {argument}: {why}");
            }
            let Some((name, value)) = argument.split_once('=').filter(|_| *of != "bool") else {
                continue;
            };
            if let Err(why) = P::try_parse_from([program, name, value]) {
                panic!("{program} {name} {value:?}: {why}");
            }
        }
    }
    // The last one of several counts.
    let twice: Vec<_> = lines.iter().flat_map(|(flag, of)| arguments(flag, of)).collect();
    P::try_parse_from(std::iter::once(program.to_owned()).chain(twice))
        .map_err(|why| panic!("{why}"))
        .ok();
}

#[test]
fn every_upstream_flag_of_the_manager_is_accepted() {
    check::<Manager>("kruise-manager", MANAGER);
}

#[test]
fn every_upstream_flag_of_the_daemon_is_accepted() {
    check::<Daemon>("kruise-daemon", DAEMON);
}

/// That each is a flag of OpenKruise's program.
fn recorded(flags: &str, arguments: &[&str]) {
    for argument in arguments.iter().skip(1) {
        let flag = argument.trim_start_matches("--").split('=').next().unwrap();
        let known = flags.lines().any(|line| line.split(' ').next() == Some(flag));
        assert!(known, "{} has no --{flag}", arguments[0]);
    }
}

/// As the Helm chart writes them where nothing is configured.
#[test]
fn arguments_of_the_helm_chart_start_both_programs() {
    let daemon = [
        "kruise-daemon",
        "--logtostderr=true",
        "--v=4",
        "--addr=:10221",
        "--feature-gates=",
        "--socket-file=",
        "--max-workers-for-pull-image=-1",
        "--plugin-config-file=/kruise/CredentialProviderPlugin.yaml",
        "--plugin-bin-dir=/kruise/plugins",
        "--enable-pprof=false",
    ];
    recorded(DAEMON, &daemon);
    let options = Daemon::try_parse_from(daemon).unwrap().options;
    let ignored: Vec<_> = options.upstream.given().map(|(flag, _)| flag).collect();
    assert_eq!(
        ignored,
        [
            "enable-pprof",
            "logtostderr",
            "plugin-bin-dir",
            "plugin-config-file",
            "v"
        ]
    );
    let manager = [
        "kruise-manager",
        "--enable-leader-election",
        "--metrics-addr=:8080",
        "--health-probe-addr=:8000",
        "--logtostderr=true",
        "--leader-election-namespace=",
        "--leader-election-lease-duration=15s",
        "--leader-election-renew-deadline=10s",
        "--leader-election-retry-period=2s",
        "--v=4",
        "--feature-gates=",
        "--sync-period=0",
    ];
    recorded(MANAGER, &manager);
    let options = Manager::try_parse_from(manager).unwrap().options;
    assert_eq!(options.lease_namespace(), "kruise-system");
    let ignored: Vec<_> = options.upstream.given().map(|(flag, _)| flag).collect();
    assert_eq!(ignored, ["logtostderr", "sync-period", "v"]);
}
