//! Converts the controllers' status to the messages of the API.

use jiff::Timestamp;

use super::v1;
use crate::live::{self, PullPhase};

pub(super) fn pulls(pulls: Vec<live::PullStatus>) -> v1::ListPullsResponse {
    v1::ListPullsResponse {
        pulls: pulls.into_iter().map(pull).collect(),
    }
}

fn pull(pull: live::PullStatus) -> v1::Pull {
    let phase = match pull.phase {
        PullPhase::Waiting => v1::pull::Phase::Waiting,
        PullPhase::Pulling => v1::pull::Phase::Pulling,
        PullPhase::Succeeded => v1::pull::Phase::Succeeded,
        PullPhase::Failed => v1::pull::Phase::Failed,
    };
    v1::Pull {
        seconds_left: pull.seconds_left(),
        image: pull.image,
        phase: phase.into(),
        owners: pull.owners,
        waits_for: pull.waits_for.unwrap_or_default(),
        bytes_done: pull.bytes_done,
        bytes_total: pull.bytes_total.unwrap_or_default(),
        bytes_per_second: pull.bytes_per_second.unwrap_or_default(),
        attempt: pull.attempt,
        started_at: pull.started_at.map(proto_timestamp),
        ended_at: pull.ended_at.map(proto_timestamp),
        message: pull.message,
    }
}

pub(super) fn recreates(recreates: Vec<live::RecreateStatus>) -> v1::ListRecreatesResponse {
    v1::ListRecreatesResponse {
        recreates: recreates.into_iter().map(recreate).collect(),
    }
}

fn recreate(recreate: live::RecreateStatus) -> v1::Recreate {
    v1::Recreate {
        namespace: recreate.namespace,
        name: recreate.name,
        pod: recreate.pod,
        phase: recreate.phase,
        waits_for: recreate.waits_for.unwrap_or_default(),
        containers: recreate.containers.into_iter().map(container).collect(),
        seen_at: recreate.first_seen_at.map(proto_timestamp),
        deadline: recreate.deadline.map(proto_timestamp),
    }
}

fn container(container: live::RecreateContainerStatus) -> v1::RecreateContainer {
    v1::RecreateContainer {
        name: container.name,
        step: container.step,
        waits_for: container.waits_for.unwrap_or_default(),
        old_container_id: container.old_container_id.unwrap_or_default(),
        new_container_id: container.new_container_id.unwrap_or_default(),
    }
}

pub(super) fn restarts(restarts: Vec<live::RestartStatus>) -> v1::ListRestartsResponse {
    v1::ListRestartsResponse {
        restarts: restarts.into_iter().map(restart).collect(),
    }
}

fn restart(restart: live::RestartStatus) -> v1::Restart {
    v1::Restart {
        namespace: restart.namespace,
        pod: restart.pod,
        container: restart.container,
        container_id: restart.container_id,
        step: restart.step,
        waits_for: restart.waits_for.unwrap_or_default(),
    }
}

pub(super) fn runtimes(runtimes: Vec<live::RuntimeStatus>) -> v1::ListRuntimesResponse {
    v1::ListRuntimesResponse {
        runtimes: runtimes.into_iter().map(runtime).collect(),
    }
}

fn runtime(runtime: live::RuntimeStatus) -> v1::Runtime {
    v1::Runtime {
        name: runtime.name,
        version: runtime.version,
        socket: runtime.socket,
        healthy: runtime.healthy,
        message: runtime.message,
    }
}

fn proto_timestamp(timestamp: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: timestamp.as_second(),
        nanos: timestamp.subsec_nanosecond(),
    }
}
