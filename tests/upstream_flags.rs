//! Our programs start with every flag of OpenKruise's programs.
#![allow(clippy::unwrap_used, clippy::panic)]

use clap::Parser;
use {kruise_daemon as node, kruise_manager as manager};

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct ManagerArgs {
    #[command(flatten)]
    options: manager::Options,
}

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct DaemonArgs {
    #[command(flatten)]
    options: node::Options,
}

/// Flags in `--help` of OpenKruise's programs: `FLAG TYPE` per line.
const MANAGER_FLAGS: &str = include_str!("data/flags/kruise-manager.txt");
const DAEMON_FLAGS: &str = include_str!("data/flags/kruise-daemon.txt");
/// Arguments of OpenKruise's Helm chart with default values, one per line.
const CHART_MANAGER: &str = include_str!("data/flags/chart-manager.txt");
const CHART_DAEMON: &str = include_str!("data/flags/chart-daemon.txt");

/// Arguments with the flag, each of which pflag accepts.
fn sample_arguments(flag: &str, value_type: &str) -> Vec<String> {
    let values: &[&str] = match value_type {
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

fn check_flags<P: Parser>(program: &str, flags: &str) {
    let lines: Vec<_> = flags.lines().map(|line| line.split_once(' ').unwrap()).collect();
    assert!(lines.len() > 30, "{program}");
    for (flag, value_type) in &lines {
        for argument in sample_arguments(flag, value_type) {
            if let Err(why) = P::try_parse_from([program, &argument]) {
                panic!("{program} {argument}: {why}");
            }
            let Some((name, value)) = argument.split_once('=').filter(|_| *value_type != "bool") else {
                continue;
            };
            if let Err(why) = P::try_parse_from([program, name, value]) {
                panic!("{program} {name} {value:?}: {why}");
            }
        }
    }
    // The last of several occurrences wins.
    let twice: Vec<_> = lines
        .iter()
        .flat_map(|(flag, value_type)| sample_arguments(flag, value_type))
        .collect();
    P::try_parse_from(std::iter::once(program.to_owned()).chain(twice))
        .map_err(|why| panic!("{why}"))
        .ok();
}

#[test]
fn every_upstream_flag_of_the_manager_is_accepted() {
    check_flags::<ManagerArgs>("kruise-manager", MANAGER_FLAGS);
}

#[test]
fn every_upstream_flag_of_the_daemon_is_accepted() {
    check_flags::<DaemonArgs>("kruise-daemon", DAEMON_FLAGS);
}

/// Asserts that each is a flag of OpenKruise's program.
fn assert_upstream_flags(flags: &str, arguments: &[&str]) {
    for argument in arguments.iter().skip(1) {
        let flag = argument.trim_start_matches("--").split('=').next().unwrap();
        let exists = flags.lines().any(|line| line.split(' ').next() == Some(flag));
        assert!(exists, "{} has no --{flag}", arguments[0]);
    }
}

/// Test target `api_server` starts both programs with them.
#[test]
fn helm_chart_arguments_are_accepted() {
    let daemon: Vec<&str> = std::iter::once("kruise-daemon")
        .chain(CHART_DAEMON.lines())
        .collect();
    assert_upstream_flags(DAEMON_FLAGS, &daemon);
    let options = DaemonArgs::try_parse_from(daemon).unwrap().options;
    let ignored: Vec<_> = options.upstream.given().map(|(flag, _)| flag).collect();
    assert_eq!(ignored, ["enable-pprof", "logtostderr", "v"]);
    let manager: Vec<&str> = std::iter::once("kruise-manager")
        .chain(CHART_MANAGER.lines())
        .collect();
    assert_upstream_flags(MANAGER_FLAGS, &manager);
    let options = ManagerArgs::try_parse_from(manager).unwrap().options;
    assert_eq!(options.lease_namespace(), "kruise-system");
    let ignored: Vec<_> = options.upstream.given().map(|(flag, _)| flag).collect();
    assert_eq!(ignored, ["logtostderr", "sync-period", "v"]);
}
