//! The generated messages and stubs.

tonic::include_proto!("kruise.node.v1");
