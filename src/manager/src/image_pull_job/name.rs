//! The name of the controller.

/// The controller's name in `/healthz`.
pub const NAME: &str = "imagepulljob";
